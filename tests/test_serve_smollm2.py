"""`sonar serve smollm2-135m` as its users meet it: a real process, the real model, the `openai` package."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

CHAT: dict[str, Any] = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Name three colours of the rainbow."}],
    "max_tokens": 24,
    "temperature": 0,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Speculation on, in batch-invariant mode, so that every answer can be compared with every other."""
    port = free_port()
    options = ["--batch-invariant", "--max-model-len", "1024", "--port", str(port)]
    speculation = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    sonar = Path(sys.executable).with_name("sonar")
    command = [sonar, "serve", "smollm2-135m", *options, *speculation]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(server, address)
        yield address
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()


def wait_until_ready(server: subprocess.Popen[str], address: str) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert server.poll() is None, server.communicate()[1]
        try:
            if httpx.get(f"{address}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("not ready in time")


def gauge(url: str, name: str) -> float:
    found = re.search(rf"^sonar_{name}(?:{{.*}})? (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as each:
        yield each


def counts(usage: openai.types.CompletionUsage | None) -> tuple[int, int, int]:
    """Tokens of a response; how many of the prompt's were cached depends on what ran before."""
    assert usage is not None
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_a_chat_answer_streams_as_it_reads_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    assert "rainbow" in (whole.choices[0].message.content or "").lower()
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert counts(chunks[-1].usage) == counts(whole.usage)


def test_speculation_does_not_show_in_the_answer(client: openai.OpenAI) -> None:
    prompt = "one two three four five one two three four five one two three four"
    fields: dict[str, Any] = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 48, "logprobs": 3}
    for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 4}, {"temperature": 0, "frequency_penalty": 0.6}):
        drafted = client.completions.create(**fields, **sampling)
        plain = client.completions.create(**fields, **sampling, extra_body={"speculative": {"enabled": False}})
        one, two = drafted.choices[0], plain.choices[0]
        assert (one.text, one.finish_reason) == (two.text, two.finish_reason)
        assert counts(drafted.usage) == counts(plain.usage)
        assert one.logprobs is not None
        assert two.logprobs is not None
        assert one.logprobs.tokens == two.logprobs.tokens
        assert one.logprobs.token_logprobs == pytest.approx(two.logprobs.token_logprobs, abs=1e-4)


def test_seeded_choices_come_again_and_differ(client: openai.OpenAI) -> None:
    fields = {**CHAT, "temperature": 1.0, "seed": 3, "n": 3}
    first, second = (client.chat.completions.create(**fields) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3


def test_a_stop_string_is_cut_off_and_usage_counts_to_it(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT).choices[0].message.content or ""
    stop = whole[12:18]
    answer = client.chat.completions.create(**CHAT, stop=[stop])
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens < 24


async def test_dropped_streams_leave_no_page_behind(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=280) as client:

        async def one(index: int) -> int:
            stream = await client.completions.create(
                model="smollm2-135m",
                prompt=f"{index} and then",
                max_tokens=24,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            num_chunks = 0
            async for _ in stream:
                num_chunks += 1
                if index % 3 == 0 and num_chunks == 1 + index % 4:
                    await stream.close()
                    break
            return num_chunks

        counts = await asyncio.gather(*(one(index) for index in range(64)))
    assert min(counts) > 0
    deadline = time.monotonic() + 5
    while gauge(url, "num_requests_running") or gauge(url, "kv_cache_usage_perc"):
        assert time.monotonic() < deadline, "pages are still held"
        await asyncio.sleep(0.1)
    assert gauge(url, "spec_decode_num_accepted_tokens_total") > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [5] * 1024}, "prompt"),
        ({"prompt": "a", "stop_token_ids": [2**63]}, "stop_token_ids"),
        ({"prompt": "a", "n": 10**9}, "n"),
    ],
)
def test_a_bad_request_is_refused_and_the_next_one_is_served(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="smollm2-135m", max_tokens=2, extra_body=fields, prompt="unused")
    assert refused.value.body is not None
    assert refused.value.param == param
    assert client.completions.create(model="smollm2-135m", prompt="a", max_tokens=2).choices[0].text
