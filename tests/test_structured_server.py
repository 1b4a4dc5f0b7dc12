"""Structured output over HTTP: forms are prepared beside the engine's loop, and errors name the request's own field."""

from __future__ import annotations

import asyncio
import json
import time

import jsonschema
import pytest
from conftest import BuildEngine
from hypothesis import given
from hypothesis import strategies as st
from server_harness import CHAT, COMPLETIONS, HELLO, serving
from sonar_engine import engine_messages as messages
from sonar_engine.errors import InvalidRequestError
from sonar_engine.prepared_submits import PreparedSubmits
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.protocol import ChatRequest, parse
from sonar_engine.server.structured import structured_output
from sonar_engine.testing.fake_engine import FakeOptions
from sonar_engine.types import SamplingParams, StructuredOutput
from test_engine import NGRAM
from test_engine_process import PROMPT, collect, running
from test_engine_process import until as until_true

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SLOW = FakeOptions(prepare_seconds=0.6)


def asked(**fields: object) -> StructuredOutput | None:
    body = json.dumps({"messages": HELLO, **fields}).encode()
    return structured_output(parse(ChatRequest, body), ServerConfig())


def test_fields_become_forms() -> None:
    named = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    schema = StructuredOutput(kind="json_schema", content=json.dumps(SCHEMA))
    assert asked(response_format=named) == schema
    assert asked(structured_outputs={"json": SCHEMA}) == schema
    assert asked(structured_outputs={"json": json.dumps(SCHEMA)}) == schema
    assert asked(structured_outputs={"json": SCHEMA, "regex": None}, response_format={"type": "text"}) == schema
    assert asked(response_format={"type": "json_object"}) == StructuredOutput(kind="json_object")
    assert asked(structured_outputs={"json_object": True}) == StructuredOutput(kind="json_object")
    assert asked(structured_outputs={"regex": "a+"}) == StructuredOutput(kind="regex", content="a+")
    assert asked(structured_outputs={"choice": ["é", "b"]}) == StructuredOutput(kind="choice", content='["é", "b"]')
    assert asked(structured_outputs={"grammar": "start: /a/"}) == StructuredOutput(kind="grammar", content="start: /a/")
    assert asked(response_format={"type": "text"}) is None
    assert asked(response_format=None) is None


@given(st.integers(1, 60))
def test_a_schema_is_as_deep_as_the_option_allows(depth: int) -> None:
    schema: object = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    if depth <= ServerConfig().max_schema_depth:
        assert asked(structured_outputs={"json": schema}) is not None
    else:
        with pytest.raises(InvalidRequestError, match="deep") as caught:
            asked(structured_outputs={"json": schema})
        assert caught.value.param == "structured_outputs"


async def test_hostile_forms_are_400_at_once_and_others_are_served() -> None:
    deep = '{"properties":{"a":' * 30_000 + "{}" + "}}" * 30_000
    bodies = [
        ({"structured_outputs": {"json": deep}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["x" * 10] * 20_000}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x"] * 50_000}}}}, None),
    ]
    async with serving() as served:
        for body, param in bodies:
            began = time.monotonic()
            response = await served.post(CHAT, messages=HELLO, **body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == (param or "response_format")
            assert time.monotonic() - began < 2
        raw = (
            b'{"messages":[],"response_format":{"type":"json_schema","json_schema":{"schema":' + deep.encode() + b"}}}"
        )
        response = await served.http.post(CHAT, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert (await served.post(CHAT, messages=HELLO, max_tokens=2)).status_code == 200


async def test_an_error_of_the_engine_names_the_field_that_asked() -> None:
    async with serving() as served:
        wrong = await served.post(COMPLETIONS, prompt="x", structured_outputs={"regex": "wrong"})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "structured_outputs"
        assert wrong.json()["error"]["message"].startswith("structured_outputs: ")
        streamed = await served.post(COMPLETIONS, prompt="x", stream=True, structured_outputs={"grammar": "wrong"})
        assert streamed.status_code == 400


async def test_others_go_on_while_a_form_is_prepared() -> None:
    async with serving(SLOW) as served:
        began = time.monotonic()
        slow = asyncio.create_task(
            served.post(COMPLETIONS, prompt="x", max_tokens=3, structured_outputs={"regex": "a"})
        )
        await asyncio.sleep(0.05)
        for _ in range(5):
            await served.text("hello", max_tokens=5)
        assert time.monotonic() - began < 0.5
        assert (await served.http.get("/health")).status_code == 200
        assert (await slow).status_code == 200
        assert time.monotonic() - began > 0.5
        await served.until_idle()


async def test_who_leaves_while_a_form_is_prepared_never_enters_the_engine() -> None:
    async with running(SLOW) as client:
        params_of = {"max_tokens": 2000, "structured": StructuredOutput(kind="regex", content="a")}
        reader = asyncio.create_task(collect(client, SamplingParams(**params_of), PROMPT))
        await asyncio.sleep(0.1)
        reader.cancel()
        await asyncio.sleep(0.8)
        stats = await client.stats()
        assert (stats.num_running, stats.num_waiting, stats.prompt_tokens) == (0, 0, 0)
        assert client.num_open_requests == 0


async def test_a_form_that_takes_too_long_is_refused_while_it_still_compiles() -> None:
    preparing = PreparedSubmits(lambda form: time.sleep(0.5), compile_seconds=0.1)
    params = SamplingParams(structured=StructuredOutput(kind="regex", content="a"))
    assert not preparing.add(messages.Submit(1, [messages.Sequence(1, b"", SamplingParams())]))
    submit = messages.Submit(2, [messages.Sequence(2, b"", params)])
    assert preparing.add(submit)
    done: list[tuple[messages.Submit, BaseException | None]] = []

    async def refused() -> bool:
        done.extend(preparing.take_done())
        return bool(done)

    began = time.monotonic()
    await until_true(refused)
    assert 0.1 < time.monotonic() - began < 0.4
    assert done[0][0] is submit
    assert "0.1 s" in str(done[0][1])
    assert not preparing


def test_chat_answers_have_the_form_with_drafts_and_without(build_tiny: BuildEngine) -> None:
    """The server's own path from the body to the engine."""
    form = asked(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}})
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=80, structured=form) for seed in range(8)]
    texts = [
        [c.text for c in build_tiny(**options).generate([[5, 9]] * 8, params) if c.finish_reason == "stop"]
        for options in ({}, {"speculative": NGRAM})
    ]
    assert texts[0] == texts[1]
    assert texts[0]
    for text in texts[0]:
        jsonschema.validate(json.loads(text), SCHEMA)
