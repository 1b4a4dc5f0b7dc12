"""The `openai` package against a real server over TCP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from server_harness import HELLO, ServerProcess, server_process
from sonar_engine.testing.fake_engine import FakeOptions


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process(FakeOptions(tokens_per_step=3), api_keys=("key",)) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as each:
        yield each


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "sonar"


def test_a_chat_answer_with_usage(client):
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=6, temperature=0)
    assert answer.choices[0].message.role == "assistant" and len(answer.choices[0].message.content) == 6
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_chat_equals_the_whole_one(client):
    fields = {"model": "fake", "messages": HELLO, "max_completion_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "length"


def test_the_streaming_helper_puts_the_same_message_together(client):
    whole = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=20, seed=3)
    text = whole.choices[0].message.content
    with client.chat.completions.stream(model="fake", messages=HELLO, seed=3, stop=text[10:13]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(text[10:13])]
    assert final.choices[0].finish_reason == "stop"


def test_three_choices_with_a_seed_are_reproducible_and_differ(client):
    fields = {"model": "fake", "messages": HELLO, "n": 3, "seed": 11, "max_tokens": 12}
    first, second = (client.chat.completions.create(**fields) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices] and len(set(texts)) == 3


def test_completions_stream_and_not(client):
    fields = {"model": "fake", "prompt": ["one", "two"], "max_tokens": 10, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**fields)
    texts = ["", ""]
    for chunk in client.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert len(whole.choices[0].logprobs.tokens) == 10
    assert all(len(top) == 2 for top in whole.choices[0].logprobs.top_logprobs)


def test_stop_strings_end_an_answer(client):
    whole = client.completions.create(model="fake", prompt="a", max_tokens=30, temperature=0).choices[0].text
    stop = whole[10:13]
    cut = client.completions.create(model="fake", prompt="a", max_tokens=30, temperature=0, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"


def test_chat_logprobs_are_parsed(client):
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 4 and all(len(entry.top_logprobs) == 3 for entry in content)
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content


def test_extensions_travel_in_the_extra_body(client):
    answer = client.chat.completions.create(
        model="fake",
        messages=HELLO,
        max_tokens=5,
        extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "speculative": {"enabled": False}},
    )
    assert answer.usage.completion_tokens == 5


def test_errors_are_the_clients_own_classes(client, server):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model="fake", messages=HELLO, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]
        )
    assert tools.value.param == "tools"


async def test_64_streams_at_once_each_get_their_own_text(server):

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client:

        async def one(index: int) -> tuple[str, str]:
            fields = {"model": "fake", "prompt": f"prompt {index}", "max_tokens": 24, "temperature": 0}
            text = ""
            async for chunk in await client.completions.create(**fields, stream=True):
                text += chunk.choices[0].text
            return text, (await client.completions.create(**fields)).choices[0].text

        pairs = await asyncio.gather(*(one(index) for index in range(64)))
    assert all(streamed == whole for streamed, whole in pairs)
    assert len({streamed for streamed, _ in pairs}) == 64
