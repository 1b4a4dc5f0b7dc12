"""Large and hostile bodies: a 400 at once, with one short message, while everybody else is served."""

from __future__ import annotations

import json
import math
import threading
import time

import pytest
from pydantic import ValidationError
from server_harness import CHAT, COMPLETIONS, HELLO, serving
from sonar_engine.errors import InvalidRequestError
from sonar_engine.server import completions
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.protocol import ChatRequest, CompletionRequest, parse
from sonar_engine.testing.byte_tokenizer import byte_tokenizer
from tokenizers.processors import TemplateProcessing

AT_ONCE = 1.0  # seconds, on a busy machine; what is measured here took several


def refusal(model: type, body: dict) -> InvalidRequestError:
    content = json.dumps(body).encode()
    began = time.monotonic()
    with pytest.raises(InvalidRequestError) as caught:
        parse(model, content)
    assert time.monotonic() - began < AT_ONCE
    assert len(str(caught.value)) < 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [1] * 400_000}, "messages"),
        ({"messages": [{"role": "king"}] * 100_000}, "messages"),
        ({"messages": [{"role": "user", "content": [1] * 400_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{}] * 300_000}]}, "messages"),
        ({"messages": HELLO, "logit_bias": {str(i): "x" for i in range(200_000)}}, "logit_bias"),
        ({"messages": HELLO, "speculative": {str(i): i for i in range(200_000)}}, "speculative"),
        ({"messages": HELLO, **{f"field{i}": i for i in range(200_000)}}, "field0"),
        ({"messages": HELLO, "stop": [1] * 400_000}, "stop"),
        ({"messages": HELLO, "stop_token_ids": [5] * 1_000_000}, "stop_token_ids"),
        ({"messages": HELLO, "bad_words": ["a"] * 400_000}, "bad_words"),
        ({"messages": HELLO, "allowed_token_ids": ["a"] * 400_000}, "allowed_token_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_with_many_wrong_entries_is_refused_at_once(body, param):
    assert refusal(ChatRequest, body).param == param


def test_a_list_of_wrong_messages_is_told_by_its_first_one():
    assert str(refusal(ChatRequest, {"messages": [1] * 100})).startswith("messages.0: ")


async def test_more_messages_than_the_option_allows_are_400_and_parts_count():
    async with serving(server=ServerConfig(max_messages=4)) as served:
        for path in (CHAT, "/tokenize"):
            body = {"max_tokens": 1} if path == CHAT else {}
            assert (await served.post(path, messages=HELLO * 4, **body)).status_code == 200
            parts = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4}]
            for messages in (HELLO * 5, parts):
                response = await served.post(path, messages=messages, **body)
                assert response.status_code == 400 and response.json()["error"]["param"] == "messages"
                assert "at most 4" in response.json()["error"]["message"]


async def test_sampling_fields_are_checked_once_however_many_prompts(monkeypatch):
    calls = []
    real = completions.validated
    monkeypatch.setattr(completions, "validated", lambda *args: calls.append(args[2]) or real(*args))
    async with serving() as served:
        body = {"max_tokens": 1, "stop_token_ids": [5] * 1000}
        response = await served.post(COMPLETIONS, prompt=["a", "abc", "ab"], **body)
        assert response.status_code == 200 and len(response.json()["choices"]) == 3
        too_many = await served.post(COMPLETIONS, prompt=["a"] * 256, max_tokens=1, stop_token_ids=[5] * 1_000_000)
    assert calls == [3]
    assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "stop_token_ids"


async def test_the_longest_of_several_prompts_decides_whether_they_fit():
    async with serving(max_model_len=64) as served:
        response = await served.post(COMPLETIONS, prompt=["a", "x" * 63, "b"], max_tokens=2)
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


def unused(*args: object, **kwargs: object) -> list[int]:
    raise AssertionError("the text was tokenised")


async def test_a_text_that_cannot_fit_the_context_is_refused_untokenised(monkeypatch):
    async with serving(max_model_len=64) as served:
        longest = served.state.tokenizer.max_token_chars
        monkeypatch.setattr(served.state.tokenizer, "encode", unused)
        text = "x" * (64 * longest + 1)
        for path in (COMPLETIONS, "/tokenize"):
            response = await served.post(path, prompt=text)
            error = response.json()["error"]
            assert response.status_code == 400 and error["code"] == "context_length_exceeded"
            assert error["param"] == "prompt" and "at least 65 tokens" in error["message"]
        ids = await served.post(COMPLETIONS, prompt=[7] * 65)
        several = await served.post(COMPLETIONS, prompt=["a", text])
    for response in (ids, several):
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("special", [True, False])
def test_the_quick_way_to_tokenise_gives_the_ids_of_the_plain_one(special):
    tokenizer = byte_tokenizer()
    tokenizer.raw.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    texts = ["", "a", " b\n", "caf\u00e9 \U0001f600", *(f"x{token}y" for token in tokenizer.special_tokens.values())]
    for text in texts:
        expected = tokenizer.raw.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, add_special_tokens=special) == expected
        assert (expected[:1] == [1]) is special


def test_other_threads_run_while_a_long_text_is_tokenised():
    tokenizer, done, turns = byte_tokenizer(), threading.Event(), 0

    def take_turns() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    watcher = threading.Thread(target=take_turns)
    watcher.start()
    tokenizer.encode("hello world " * 100_000)
    done.set()
    watcher.join()
    assert turns > 10  # a thread that holds the interpreter's lock throughout leaves one or two


async def test_a_text_to_be_truncated_may_be_longer_than_the_context():
    async with serving(max_model_len=64) as served:
        length = 64 * served.state.tokenizer.max_token_chars + 1
        for prompt in ("x" * length, [7] * 1000):
            response = await served.post(COMPLETIONS, prompt=prompt, truncate_prompt_tokens=10, max_tokens=1)
            assert response.status_code == 200 and response.json()["usage"]["prompt_tokens"] == 10


async def test_texts_beyond_the_character_limit_are_400_untokenised(monkeypatch):
    async with serving(server=ServerConfig(max_prompt_chars=100)) as served:
        assert (await served.post(COMPLETIONS, prompt="x" * 100, max_tokens=1)).status_code == 200
        monkeypatch.setattr(served.state.tokenizer, "encode", unused)
        for path, field, value in (
            (COMPLETIONS, "prompt", "x" * 101),
            ("/tokenize", "prompt", "x" * 101),
            (CHAT, "messages", [{"role": "user", "content": "x" * 101}]),
            ("/tokenize", "messages", [{"role": "user", "content": "x" * 101}]),
        ):
            response = await served.post(path, **{field: value})
            assert response.status_code == 400 and response.json()["error"]["param"] == field


async def test_many_empty_messages_are_rendered_off_the_event_loop(monkeypatch):
    threads = []
    async with serving(max_model_len=1 << 16) as served:
        real = served.state.tokenizer.apply_chat_template

        def watched(*args: object, **kwargs: object) -> list[int]:
            threads.append(threading.current_thread())
            return real(*args, **kwargs)

        monkeypatch.setattr(served.state.tokenizer, "apply_chat_template", watched)
        assert (await served.post("/tokenize", messages=HELLO)).status_code == 200
        assert (await served.post("/tokenize", messages=[{"role": "user", "content": ""}] * 1000)).status_code == 200
        kwargs = {"padding": ["x"] * 100}
        assert (await served.post("/tokenize", messages=HELLO, chat_template_kwargs=kwargs)).status_code == 200
    assert [thread is threading.current_thread() for thread in threads] == [True, False, False]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0: "),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: "),
        ({"messages": HELLO, "stop": ["a", 5]}, "stop.1: "),
        ({"messages": HELLO, "logit_bias": {"1": "x"}}, "logit_bias.1: "),
        ({"messages": HELLO, "speculative": {"a": 1}}, "unknown field speculative.a; leave it out"),
        (
            {"messages": HELLO, "speculative": {"enable": True}},
            "unknown field speculative.enable; did you mean speculative.enabled?",
        ),
        ({"messages": HELLO, "temprature": 1}, "unknown field temprature; did you mean temperature?"),
        ({}, "messages is missing"),
    ],
)
def test_messages_speak_of_fields_and_positions_alone(body, message):
    assert str(refusal(ChatRequest, body)).startswith(message)


def test_a_body_that_is_no_object_says_so():
    for body in (b"[]", b"5", b"null"):
        with pytest.raises(InvalidRequestError, match="must be a JSON object"):
            parse(CompletionRequest, body)
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse(CompletionRequest, b"{")


@pytest.mark.parametrize(
    ("option", "above"), [("max_stop_strings", 17), ("max_stop_chars", 257), ("max_logit_bias", 1025)]
)
def test_an_option_above_what_the_engine_can_do_is_refused_at_the_start(option, above):
    with pytest.raises(ValidationError, match=option):
        ServerConfig(**{option: above})
    assert getattr(ServerConfig(**{option: above - 1}), option) == above - 1


def test_an_empty_host_is_refused():
    with pytest.raises(ValidationError, match="host"):
        ServerConfig(host="")


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize(
    "option",
    [name for name, field in ServerConfig.model_fields.items() if "float" in str(field.annotation)],
)
def test_times_that_are_no_finite_number_are_refused(option, value):
    with pytest.raises(ValidationError, match=option):
        ServerConfig(**{option: value})
