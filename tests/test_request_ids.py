"""Every response names its request, by the client's own id or one made for it."""

from __future__ import annotations

import re

import pytest
from server_harness import CHAT, COMPLETIONS, HELLO, serving
from sonar_engine.server.config import ServerConfig


async def test_a_clients_header_comes_back_on_answers_streams_and_errors():
    async with serving(server=ServerConfig(api_keys=("key",))) as served:
        bearer = {"Authorization": "Bearer key"}
        calls = (
            ("GET", "/health", None, bearer, 200),
            ("POST", COMPLETIONS, {"prompt": "a"}, bearer, 200),
            ("POST", CHAT, {"messages": HELLO, "stream": True}, bearer, 200),
            ("POST", COMPLETIONS, {"prompt": "a", "temperature": "x"}, bearer, 400),
            ("POST", COMPLETIONS, {"prompt": "a"}, {}, 401),
            ("GET", "/nowhere", None, bearer, 404),
            ("PUT", COMPLETIONS, None, bearer, 405),
        )
        for number, (method, path, body, headers, status) in enumerate(calls):
            own = f"mine {number} #!"
            response = await served.http.request(method, path, json=body, headers={**headers, "X-Request-Id": own})
            assert response.status_code == status, path
            assert response.headers.get_list("x-request-id") == [own]


async def test_a_request_without_an_id_gets_one_of_its_own():
    async with serving() as served:
        responses = [await served.http.get(path) for path in ("/health", "/health", "/nowhere")]
        responses.append(await served.post(COMPLETIONS, prompt="a"))
    ids = [response.headers["x-request-id"] for response in responses]
    assert len(set(ids)) == 4
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids)


async def test_the_bodys_id_comes_back_and_the_headers_goes_before_it():
    async with serving() as served:
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream, "request_id": "body"}
            assert (await served.post(COMPLETIONS, **body)).headers["x-request-id"] == "body"
            both = await served.http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "header"})
            assert both.headers.get_list("x-request-id") == ["header"]
        refused = await served.post(COMPLETIONS, prompt="a", request_id="body", n=0)
        assert refused.status_code == 400
        assert refused.headers["x-request-id"] == "body"


@pytest.mark.parametrize("wrong", [b"", b"x" * 129, b"a\x7f", "caf\u00e9".encode(), b"a\tb"])
async def test_a_header_that_is_no_id_is_400_and_is_not_repeated(wrong: bytes):
    async with serving() as served:
        response = await served.http.post(COMPLETIONS, json={"prompt": "a"}, headers={b"X-Request-Id": wrong})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "X-Request-Id")
        assert "1 to 128 printable ASCII" in error["message"]
        assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


@pytest.mark.parametrize("wrong", ["", "x" * 129, "a\nb", "caf\u00e9"])
async def test_a_body_whose_id_is_none_is_400_and_is_not_repeated(wrong: str):
    async with serving() as served:
        response = await served.post(COMPLETIONS, prompt="a", request_id=wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")
        assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
