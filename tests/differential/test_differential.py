"""The same request says the same over HTTP: drafting or not, streamed or not, whatever runs beside it.

`python -m pytest tests/differential --matrix=full` runs the whole corpus, `make test` a slice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from corpus import Answer, Request, answer_of_stream, answer_of_whole, make_corpus
from sonar_engine.config import EngineConfig
from sonar_engine.engine_client import EngineClient
from sonar_engine.models.registry import resolve_model
from sonar_engine.server.app import create_app
from sonar_engine.server.config import ServerConfig
from sonar_engine.testing.engine_thread import launch_thread
from sonar_engine.tokenizer import Tokenizer, load_tokenizer
from tiny_heads import make_head

ADMIN = {"authorization": "Bearer admin"}
DRAFTERS = ("none", "ngram", "mtp", "oracle 0", "oracle 0.5", "oracle 1")
CONCURRENCY = (1, 8, 64)
ROOMY, TIGHT = {"kv_cache_tokens": 16384}, {"kv_cache_tokens": 384, "max_num_batched_tokens": 48}
pytestmark = pytest.mark.timeout(3600)


@dataclass(frozen=True)
class Reference:
    target: Path
    tokenizer: Tokenizer
    corpus: list[Request]
    answers: list[Answer]  # one at a time, not streamed, without drafts
    texts: Path  # what the oracle replays


class Server:
    """The whole server over a tiny model, its engine on a thread."""

    def __init__(self, http: httpx.AsyncClient, client: EngineClient) -> None:
        self._http = http
        self.client = client

    async def answer(self, request: Request, stream: bool) -> Answer:
        body = dict(request.body)
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        response = await self._http.post(request.path, json=body)
        assert response.status_code == 200, response.text
        return answer_of_stream(response.text) if stream else answer_of_whole(response.json())

    async def answers(self, corpus: list[Request], stream: bool, concurrency: int) -> list[Answer]:
        gate = asyncio.Semaphore(concurrency)

        async def one(request: Request) -> Answer:
            async with gate:
                return await self.answer(request, stream)

        return list(await asyncio.gather(*(one(request) for request in corpus)))

    async def forget_prefixes(self) -> None:
        response = await self._http.post("/reset_prefix_cache", headers=ADMIN)
        assert response.json() == {"done": True}, response.text


@asynccontextmanager
async def serving(target: Path, tokenizer: Tokenizer, **options: Any) -> AsyncIterator[Server]:
    common: dict[str, Any] = {"model": str(target), "dtype": "float32", "device": "cpu", "batch_invariant": True}
    common |= {"num_threads": 1, "max_model_len": 192, "max_num_seqs": 64, "page_size": 4}
    client = EngineClient(EngineConfig(**{**common, **options}), launch=launch_thread)
    await client.start()
    transport = httpx.ASGITransport(create_app(client, tokenizer, ServerConfig(admin_key="admin")))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=600) as http:
            yield Server(http, client)
    finally:
        await client.shutdown()


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    full = request.config.getoption("--matrix") == "full"
    corpus, tokenizer = make_corpus(128 if full else 64), load_tokenizer(resolve_model(str(tiny_folder)))

    async def run() -> tuple[list[Answer], list[list[int]]]:
        async with serving(tiny_folder, tokenizer, **ROOMY) as server:
            answers = await server.answers(corpus, stream=False, concurrency=1)
            return answers, [await _prompt_ids(server, each) for each in corpus]

    answers, prompts = asyncio.run(run())
    file = tmp_path_factory.mktemp("oracle") / "texts.jsonl"
    lines = [
        json.dumps({"prompt_token_ids": prompt, "token_ids": answer.choices[0].ids})
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    return Reference(tiny_folder, tokenizer, corpus, answers, file)


async def _prompt_ids(server: Server, request: Request) -> list[int]:
    fields = {name: request.body[name] for name in ("prompt", "messages") if name in request.body}
    response = await server._http.post("/tokenize", json=fields)
    ids: list[int] = response.json()["tokens"]
    return ids


def test_the_corpus_holds_every_kind_of_end_and_form(reference: Reference) -> None:
    choices = [choice for answer in reference.answers for choice in answer.choices.values()]
    assert {choice.finish_reason for choice in choices} == {"stop", "length"}
    assert any(isinstance(choice.stop_reason, str) for choice in choices)
    assert any(isinstance(choice.stop_reason, int) for choice in choices)
    assert any(choice.logprobs for choice in choices)
    assert any(len(answer.choices) == 2 for answer in reference.answers)
    assert any(choice.finish_reason == "stop" and choice.stop_reason is None for choice in choices)


@pytest.mark.parametrize("supply", [ROOMY, TIGHT], ids=["roomy", "preempting"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_way_of_serving_gives_the_same_answers(
    drafter: str, supply: dict[str, Any], reference: Reference, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    full = request.config.getoption("--matrix") == "full"

    async def run() -> tuple[int, int, int]:
        options = supply | ({} if drafter == "none" else {"speculative": speculative(drafter, reference, tmp_path)})
        async with serving(reference.target, reference.tokenizer, **options) as server:
            for concurrency in CONCURRENCY:
                every = 1 if full or concurrency > 1 else 8  # of the slice, few are run alone
                corpus, wanted = reference.corpus[::every], reference.answers[::every]
                await server.forget_prefixes()
                for stream in (False, True):  # the second time over a warm prefix cache
                    answers = await server.answers(corpus, stream, concurrency)
                    for each, answer, same in zip(corpus, answers, wanted, strict=True):
                        assert answer == same, (each, concurrency, stream)
            stats = await server.client.stats()
            assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
            assert stats.prefix_hits > 0
            return stats.num_preemptions, stats.num_draft_tokens, stats.num_accepted_tokens

    preemptions, drafted, accepted = asyncio.run(run())
    assert (preemptions > 0) == (supply is TIGHT)
    assert (drafted > 0) == (drafter != "none")
    assert (accepted > 0) == (drafter not in ("none", "oracle 0"))


def speculative(drafter: str, reference: Reference, folder: Path) -> dict[str, Any]:
    if drafter == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if drafter == "mtp":
        head = make_head(reference.target, folder / "head")
        return {"method": "mtp", "model": str(head), "num_speculative_tokens": 3}
    rates = [float(drafter.split()[1])]
    texts = str(reference.texts)
    return {"method": "oracle", "oracle_texts": texts, "oracle_rates": rates, "num_speculative_tokens": 4}
