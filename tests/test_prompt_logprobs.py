"""Log-probabilities of a prompt: those of transformers, however the prompt is cut, cached, preempted or drafted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BuildEngine
from server_harness import CHAT, COMPLETIONS, HELLO, TOKENIZER, serving
from sonar_engine.types import Completion, SamplingParams
from test_engine import NGRAM, make_prompts
from tiny_models import transformers_model

PROMPTS = make_prompts(7, longest=70, seed=3)
SCORED = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=3)
RUNS: dict[str, dict[str, Any]] = {
    "in one piece": {},
    "in chunks of few tokens": {"max_num_batched_tokens": 9},
    "with few pages": {"kv_cache_tokens": 96, "max_model_len": 92},
    "while others draft": {"speculative": NGRAM},
    "speculating in mixed batches": {"speculative": {**NGRAM, "speculate_in_mixed_batches": True}},
}


def _check(completion: Completion, logits: torch.Tensor, num_top: int) -> None:
    """logits [P, V] of the prompt."""
    prompt, entries = completion.prompt_token_ids, completion.prompt_logprobs
    wanted = logits.log_softmax(-1)
    assert entries is not None
    assert len(entries) == len(prompt) - 1
    for position, entry in enumerate(entries):
        here = wanted[position]
        assert entry.logprob == pytest.approx(float(here[prompt[position + 1]]), abs=2e-4)
        assert entry.rank == int((logits[position] > logits[position][prompt[position + 1]]).sum()) + 1
        assert entry.top_logprobs == pytest.approx(here.topk(num_top).values.tolist(), abs=2e-4)
        assert len(entry.top_ids) == num_top


@pytest.mark.parametrize("name", RUNS)
def test_prompts_have_the_log_probabilities_of_transformers(
    name: str, build_tiny: BuildEngine, tiny_folder: Path
) -> None:
    reference = transformers_model(tiny_folder)
    engine = build_tiny(**RUNS[name])
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    params = [plain if index == 2 else SCORED for index in range(len(PROMPTS))]
    for _ in range(2):  # the second time what the first has left in the prefix cache must not hide the prompts
        completions = engine.generate(PROMPTS, params)
        for prompt, own, completion in zip(PROMPTS, params, completions, strict=True):
            if own is plain:
                assert completion.prompt_logprobs is None
            else:
                _check(completion, reference(torch.tensor([prompt])).logits[0].float(), 3)
    if name == "with few pages":
        assert engine.stats().num_preemptions > 0
    engine.check_integrity()


def test_scored_and_other_requests_share_no_pages_and_the_answers_are_the_same(build_tiny: BuildEngine) -> None:
    engine = build_tiny()
    prompt = PROMPTS[0] * 3
    plain = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    first = engine.generate([prompt], plain)[0]
    scored = engine.generate(
        [prompt], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, prompt_logprobs=0)
    )[0]
    assert scored.metrics.num_cached_tokens == 0
    assert scored.token_ids == first.token_ids
    assert scored.prompt_logprobs is not None
    assert [entry.top_ids for entry in scored.prompt_logprobs] == [[]] * (len(prompt) - 1)
    assert engine.generate([prompt], plain)[0].metrics.num_cached_tokens > 0


def test_a_prompt_of_one_token_has_none(build_tiny: BuildEngine) -> None:
    assert build_tiny().generate([[5]], SCORED)[0].prompt_logprobs == []


# Over HTTP


async def test_echo_with_logprobs_scores_the_prompt_and_then_the_answer() -> None:
    async with serving() as server:
        answer = await server.text("the cat", echo=True, logprobs=2, max_tokens=3, temperature=0)
    logprobs, size = answer["logprobs"], len(TOKENIZER.encode("the cat"))
    assert len(logprobs["tokens"]) == size + 3
    assert "".join(logprobs["tokens"]) == answer["text"]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (size + 2)
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    starts = [len("".join(logprobs["tokens"][:index])) for index in range(size + 3)]
    assert logprobs["text_offset"] == starts


async def test_no_tokens_at_all_leave_the_scored_prompt() -> None:
    async with serving() as server:
        response = await server.post(
            COMPLETIONS, prompt=["the cat", "a dog"], echo=True, logprobs=1, max_tokens=0, temperature=0
        )
        bare = await server.text("the cat", max_tokens=0)
        await server.until_idle()
    body, sizes = response.json(), [len(TOKENIZER.encode(text)) for text in ("the cat", "a dog")]
    assert [choice["text"] for choice in body["choices"]] == ["the cat", "a dog"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == sizes
    assert body["usage"]["completion_tokens"] == 0
    assert (bare["text"], bare["logprobs"], bare["finish_reason"]) == ("", None, "length")


async def test_a_stream_tells_the_same_as_a_whole_answer() -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 5, "temperature": 0}
    async with serving() as server:
        whole = await server.text("the cat", **fields)
        chunks = (await server.events(COMPLETIONS, prompt="the cat", **fields)).of(0)
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts for value in part[name]] == values


async def test_prompt_logprobs_are_told_by_id_as_vllm_does() -> None:
    async with serving() as server:
        answer = await server.text("cat", prompt_logprobs=2, max_tokens=1, temperature=0)
        chat = (await server.post(CHAT, messages=HELLO, prompt_logprobs=0, max_tokens=1)).json()
    ids = TOKENIZER.encode("cat")
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1] == {
        str(ids[1]): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        str(ids[1] + 1): {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
    }
    assert answer["logprobs"] is None
    assert chat["prompt_logprobs"][0] is None
    assert [len(entry) for entry in chat["prompt_logprobs"][1:]] == [1] * (chat["usage"]["prompt_tokens"] - 1)
    assert "prompt_logprobs" not in chat["choices"][0]
