"""Bad requests: one JSON shape, the right status, the field named; the next request is served as ever."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from server_harness import CHAT, COMPLETIONS, HELLO, serving
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.dashboard import PAGE_FILES
from sonar_engine.testing.fake_engine import FakeOptions

NESTED = "[" * 30000 + "]" * 30000


def chat(**fields: object) -> tuple[str, dict]:
    return CHAT, {"messages": HELLO, "max_tokens": 2, **fields}


def completion(**fields: object) -> tuple[str, dict]:
    return COMPLETIONS, {"prompt": "a", "max_tokens": 2, **fields}


BAD = [
    (completion(max_tokens="5"), "max_tokens"),
    (completion(max_tokens=1.5), "max_tokens"),
    (completion(max_tokens=True), "max_tokens"),
    (completion(max_tokens=-1), "max_tokens"),
    (completion(max_tokens=10**30), "max_tokens"),
    (completion(n="3"), "n"),
    (completion(n=0), "n"),
    (completion(n=10**9), "n"),
    (completion(n=10**400), "n"),
    (completion(temperature="0.5"), "temperature"),
    (completion(temperature=-1), "temperature"),
    (completion(top_p=0), "top_p"),
    (completion(top_p=1.1), "top_p"),
    (completion(top_k=-2), "top_k"),
    (completion(min_p=2), "min_p"),
    (completion(presence_penalty=3), "presence_penalty"),
    (completion(frequency_penalty=-3), "frequency_penalty"),
    (completion(repetition_penalty=0), "repetition_penalty"),
    (completion(min_tokens=3), "min_tokens"),
    (completion(seed=2**63), "seed"),
    (completion(seed="1"), "seed"),
    (completion(stop=5), "stop"),
    (completion(stop=[5]), "stop"),
    (completion(stop=[""]), "stop"),
    (completion(stop=["x"] * 17), "stop"),
    (completion(stop="x" * 257), "stop"),
    *((completion(stop_token_ids=[bad]), "stop_token_ids") for bad in (-1, 264, 2**31, 2**63, "5", 1.5, True)),
    *((completion(allowed_token_ids=[bad]), "allowed_token_ids") for bad in (-1, 264, 2**31, 2**63)),
    (completion(allowed_token_ids=[]), "allowed_token_ids"),
    *((completion(logit_bias={bad: 1}), "logit_bias") for bad in ("-1", "264", "9" * 30, "x", "", "1.5", "\u0663")),
    (completion(logit_bias={"1": 101}), "logit_bias"),
    (completion(logit_bias={"1": "1"}), "logit_bias"),
    (completion(logit_bias={str(i): 0 for i in range(1025)}), "logit_bias"),
    *((completion(prompt=[bad]), "prompt") for bad in (-1, 264, 2**31, 2**63, 10**40)),
    (completion(prompt=""), "prompt"),
    (completion(prompt=[]), "prompt"),
    (completion(prompt=["a", ""]), "prompt"),
    (completion(prompt=[[]]), "prompt"),
    (completion(prompt=[[1], "a", 2]), "prompt"),
    (completion(prompt=None), "prompt"),
    (completion(prompt={"text": "a"}), "prompt"),
    (completion(prompt=["a"] * 257), "prompt"),
    (completion(prompt=["a"] * 100, n=100), "n"),
    (completion(logprobs=21), "logprobs"),
    (completion(logprobs=-1), "logprobs"),
    (completion(prompt_logprobs=-1), "prompt_logprobs"),
    (completion(prompt_logprobs=21), "prompt_logprobs"),
    (completion(prompt_logprobs=1, stream=True), "prompt_logprobs"),
    (completion(max_tokens=-1), "max_tokens"),
    (chat(max_tokens=0), "max_tokens"),
    (completion(suffix="x"), "suffix"),
    (completion(best_of=2), "best_of"),
    (completion(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
    (completion(cache_salt=""), "cache_salt"),
    (completion(priority="high"), "priority"),
    (completion(speculative={"enabled": "no"}), "speculative"),
    (completion(speculative={"num_speculative_tokens": -1}), "num_speculative_tokens"),
    (completion(speculative={"k": 2}), "speculative"),
    (completion(request_id="a\nb"), "request_id"),
    (completion(stream_options={"include_usage": True}), "stream_options"),
    (completion(temprature=1), "temprature"),
    (chat(messages=[]), "messages"),
    (chat(messages=None), "messages"),
    (chat(messages="hi"), "messages"),
    (chat(messages=[{"role": "king", "content": "x"}]), "messages"),
    (chat(messages=[{"role": "user"}]), "messages"),
    (chat(messages=[{"role": "user", "content": 5}]), "messages"),
    (chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), "messages"),
    (chat(messages=[{"role": "user", "content": "x", "colour": "red"}]), "messages"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(logprobs=1), "logprobs"),
    (chat(tools=[{"type": "function"}]), "tools"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(response_format={"type": "yaml"}), "response_format"),
    (chat(response_format={"type": "json_schema"}), "response_format"),
    (chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}), "response_format"),
    (chat(response_format={"type": "json_schema", "json_schema": {"scheme": {}}}), "response_format"),
    (chat(response_format={"type": "json_schema", "json_schema": {"schema": [1]}}), "response_format"),
    (chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}), "structured_outputs"),
    (chat(structured_outputs={}), "structured_outputs"),
    (chat(structured_outputs={"regex": "a", "choice": ["a"]}), "structured_outputs"),
    (chat(structured_outputs={"json": "{"}), "structured_outputs"),
    (chat(structured_outputs={"choice": [1]}), "structured_outputs"),
    (chat(structured_outputs={"regexp": "a"}), "structured_outputs"),
    (chat(structured_outputs={"regex": "wrong"}), "structured_outputs"),
    (chat(response_format={"type": "json_object"}, ignore_eos=True), "ignore_eos"),
    (chat(chat_template="{{ 1 }}"), "chat_template"),
    (chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}), "chat_template_kwargs"),
    (chat(chat_template_kwargs={"self": 1}), "chat_template_kwargs"),
    (chat(chat_template_kwargs=[1]), "chat_template_kwargs"),
    (chat(max_tokens=None, max_completion_tokens=0), "max_completion_tokens"),
    (chat(bad_words=["several tokens"]), "bad_words"),
    (chat(bad_words=["x" * 257]), "bad_words"),
    (chat(reasoning_effort="high"), "reasoning_effort"),
]


async def test_every_bad_field_is_a_400_that_names_it_and_harms_nobody():
    async with serving() as served:
        for (path, body), param in BAD:
            response = await served.http.post(path, content=json.dumps(body).encode(), headers=JSON)
            assert response.status_code == 400, (body, response.text)
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error", error
            assert error["param"] == param, (str(body)[:200], error)
            assert error["message"] and len(error["message"]) < 600
        assert (await served.text("a", max_tokens=2))["finish_reason"] == "length"
        await served.until_idle()


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("body", ["", "{", "[]", "5", "null", '"x"', "\xff", '{"prompt": NaN}', NESTED])
async def test_bodies_that_are_no_json_object_are_400(body):
    async with serving() as served:
        response = await served.http.post(COMPLETIONS, content=body.encode("latin-1"), headers=JSON)
    assert response.status_code == 400 and response.json()["error"]["message"]


async def test_not_a_number_is_no_number():
    async with serving() as served:
        content = b'{"prompt": "a", "temperature": NaN, "max_tokens": 1}'
        response = await served.http.post(COMPLETIONS, content=content, headers=JSON)
    assert response.status_code == 400 and response.json()["error"]["param"] == "temperature"


async def test_numbers_and_strings_beyond_reason_are_400():
    async with serving() as served:
        for body in (
            b'{"prompt": "a", "seed": %s}' % (b"9" * 6000),
            b'{"prompt": "\\ud800"}',
            b'{"prompt": "a", "n": 1e400}',
        ):
            response = await served.http.post(COMPLETIONS, content=body, headers=JSON)
            assert response.status_code == 400, body


async def test_a_deeply_nested_value_is_a_400():
    async with serving() as served:
        content = b'{"prompt": "a", "response_format": %s}' % NESTED.encode()
        response = await served.http.post(COMPLETIONS, content=content, headers=JSON)
    assert response.status_code == 400


async def test_a_billion_choices_are_refused_at_once():
    async with serving() as served:
        await served.text("a")
        began = time.monotonic()
        response = await served.post(COMPLETIONS, prompt="a", n=10**9)
        assert time.monotonic() - began < 0.05
    assert response.status_code == 400


async def test_a_prompt_that_is_too_long_says_the_limit_the_prompt_and_what_was_asked():
    async with serving(FakeOptions(max_model_len=64)) as served:
        long = await served.post(COMPLETIONS, prompt="x" * 64, max_tokens=1)
        both = await served.post(COMPLETIONS, prompt="x" * 60, max_tokens=5)
        chat_both = await served.post(CHAT, messages=HELLO, max_completion_tokens=60)
        last = await served.text("x" * 63, max_tokens=1)
        exact = await served.text("x" * 60, max_tokens=4)
    for response, numbers in ((long, ("64", "64", "1")), (both, ("64", "60", "5"))):
        error = response.json()["error"]
        assert response.status_code == 400 and error["code"] == "context_length_exceeded"
        assert all(number in error["message"] for number in numbers), error
    assert chat_both.json()["error"]["param"] == "max_completion_tokens"
    assert last["finish_reason"] == exact["finish_reason"] == "length"


async def test_an_unknown_model_is_404():
    async with serving() as served:
        response = await served.post(COMPLETIONS, prompt="a", model="gpt-9")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "not_found_error")


async def test_unknown_paths_and_methods_have_the_same_shape():
    async with serving() as served:
        missing = await served.http.get("/v1/nothing")
        method = await served.http.get(CHAT)
    assert missing.status_code == 404 and missing.json()["error"]["message"]
    assert method.status_code == 405 and method.json()["error"]["message"] and "POST" in method.headers["allow"]


async def test_a_body_beyond_the_limit_is_413_whether_declared_or_not():
    async with serving(server=ServerConfig(max_body_bytes=1000)) as served:
        declared = await served.post(COMPLETIONS, prompt="x" * 1000)

        async def parts():
            for _ in range(20):
                yield b"x" * 100

        chunked = await served.http.post(COMPLETIONS, content=parts(), headers=JSON)
    assert declared.status_code == chunked.status_code == 413
    assert declared.json()["error"]["message"]


async def test_another_content_type_is_415():
    async with serving() as served:
        response = await served.http.post(COMPLETIONS, content=b"prompt=a", headers={"content-type": "text/plain"})
        suffixed = await served.http.post(
            COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": "application/json; charset=utf-8"}
        )
    assert response.status_code == 415 and suffixed.status_code == 200


async def test_too_many_or_too_large_headers_are_431():
    async with serving(server=ServerConfig(max_header_count=20, max_header_bytes=2000)) as served:
        many = await served.http.get("/version", headers={f"x-{i}": "1" for i in range(30)})
        large = await served.http.get("/version", headers={"x-large": "1" * 3000})
    assert many.status_code == large.status_code == 431


async def test_keys_guard_every_route_but_health_ready_and_the_page():
    async with serving(server=ServerConfig(api_keys=("first", "second"))) as served:
        for path in (
            "/v1/models",
            "/metrics",
            "/version",
            "/load",
            "/dashboard/data",
            "/page",
            "/page/x",
            "/v1/nothing",
        ):
            assert (await served.http.get(path)).status_code == 401, path
        assert (await served.post(COMPLETIONS, prompt="a")).status_code == 401
        assert (await served.http.get("/openapi.json")).status_code == 401
        for path in ("/health", "/ready", *PAGE_FILES):
            assert (await served.http.get(path)).status_code == 200
        for given, status in (
            ("Bearer first", 200),
            ("Bearer second", 200),
            ("bearer second", 200),
            ("Bearer firs", 401),
            ("Bearer first2", 401),
            ("Bearer ", 401),
            ("first", 401),
            ("Basic first", 401),
            ("Bearer caf\xe9", 401),
        ):
            headers = [(b"authorization", given.encode("latin-1"))]
            response = await served.http.get("/v1/models", headers=headers)
            assert response.status_code == status, given
        error = (await served.http.get("/v1/models")).json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


async def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch):
    from sonar_engine.server import guard

    compared = []
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    async with serving(server=ServerConfig(api_keys=("a", "b", "c"))) as served:
        response = await served.http.get("/v1/models", headers={"Authorization": "Bearer a"})
    assert response.status_code == 200 and [pair[1] for pair in compared] == [b"a", b"b", b"c"]


async def test_admin_routes_need_the_admin_key():
    async with serving(server=ServerConfig(api_keys=("user",), admin_key="root")) as served:
        user, root = ({"Authorization": f"Bearer {key}"} for key in ("user", "root"))
        assert (await served.http.post("/reset_prefix_cache", headers=user)).status_code == 401
        done = await served.http.post("/reset_prefix_cache", headers=root)
        assert (await served.http.get("/v1/models", headers=root)).status_code == 200
    async with serving() as served:
        off = await served.http.post("/reset_prefix_cache")
    assert done.json() == {"done": True}
    assert off.status_code == 403 and off.json()["error"]["code"] == "admin_disabled"


async def test_a_full_queue_is_429_with_retry_after():
    async with serving(FakeOptions(step_seconds=0.01), max_num_seqs=1, max_waiting=1) as served:
        response = await served.post(COMPLETIONS, prompt="a", n=4, max_tokens=50)
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        await served.until_idle()


async def test_a_queue_full_of_prompt_tokens_is_429():
    async with serving(FakeOptions(step_seconds=0.02, prefill_steps=20), ServerConfig(max_queued_tokens=150)) as served:
        first = asyncio.create_task(served.post(COMPLETIONS, prompt="x" * 100, max_tokens=1))
        await asyncio.sleep(0.1)
        second = await served.post(COMPLETIONS, prompt="x" * 100, max_tokens=1)
        assert (await first).status_code == 200
        third = await served.post(COMPLETIONS, prompt="x" * 100, max_tokens=1)
    assert (second.status_code, third.status_code) == (429, 200)


async def test_a_request_beyond_the_time_limit_is_504_and_frees_its_pages():
    async with serving(FakeOptions(step_seconds=0.02), ServerConfig(request_timeout=0.2)) as served:
        response = await served.post(COMPLETIONS, prompt="a", max_tokens=1000)
        events = await served.events(COMPLETIONS, prompt="a", max_tokens=1000)
        await served.until_idle()
    assert response.status_code == 504 and response.json()["error"]["code"] == "request_timeout"
    assert events.chunks[-1]["error"]["code"] == "request_timeout"


async def test_while_loading_or_draining_everything_else_is_503():
    async with serving() as served:
        for phase, code in (("loading", "loading"), ("draining", "server_stopping"), ("dead", "engine_dead")):
            served.state.phase = phase
            response = await served.post(COMPLETIONS, prompt="a")
            assert response.status_code == 503 and response.json()["error"]["code"] == code
            assert int(response.headers["retry-after"]) >= 1
            assert (await served.http.get("/ready")).status_code == 503
            assert (await served.http.get("/version")).status_code == 200


async def test_an_error_inside_the_server_is_a_500_that_says_nothing_of_its_inside(monkeypatch):
    async with serving() as served:
        monkeypatch.setattr(served.state.client, "open", None)
        response = await served.post(COMPLETIONS, prompt="a")
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "the server failed; its log says why",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


@pytest.mark.parametrize("body", [{"tokens": [-1]}, {"tokens": [264]}, {"tokens": [2**40]}, {"tokens": "x"}, {}])
async def test_detokenize_refuses_ids_out_of_range(body):
    async with serving() as served:
        response = await served.http.post("/detokenize", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "tokens"


async def test_tokenize_wants_exactly_one_of_prompt_and_messages():
    async with serving() as served:
        for body in ({}, {"prompt": "a", "messages": HELLO}):
            assert (await served.http.post("/tokenize", json=body)).status_code == 400
