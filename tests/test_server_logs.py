"""What the server logs: one line a request on demand, as text or JSON, with numbers and never a text or a key."""

from __future__ import annotations

import json
import os
import re
import signal
import socket

import httpx
import pytest
from server_harness import CHAT, COMPLETIONS, HELLO, ServerProcess, server_process
from sonar_engine.testing.fake_engine import FakeOptions

UTC_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
PROMPT, KEY = "a very private prompt", "a-very-private-key"
DRAFTING = FakeOptions(tokens_per_step=3, step_seconds=0.002)


def talk(server: ServerProcess) -> list[str]:
    """Answers of every kind; their texts."""
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=20) as http:
        whole = http.post(COMPLETIONS, json={"prompt": PROMPT, "max_tokens": 31, "request_id": 'whole " = one'})
        stream = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 7, "n": 2, "stream": True}
        http.post(CHAT, json=stream, headers={"X-Request-Id": "streamed"})
        http.post(COMPLETIONS, json={"prompt": PROMPT, "temperature": -1}, headers={"X-Request-Id": "refused"})
        http.get("/v1/models/other%20name", headers={"X-Request-Id": "other"})
        http.get("/health", headers={"Authorization": "Bearer wrong-key", "X-Request-Id": "health"})
        http.get(f"/secret-{'x' * 300}", headers={"Authorization": "Bearer wrong-key", "X-Request-Id": "nobody"})
        with http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}, headers={"X-Request-Id": "gone"}) as r:
            next(r.iter_bytes())
    return [whole.json()["choices"][0]["text"], PROMPT, KEY, "wrong-key"]


def ended(server: ServerProcess) -> list[str]:
    server.process.terminate()
    assert server.wait() == 0
    return server.rest()


def requests_of(lines: list[str]) -> dict[str, dict[str, object]]:
    logged = [json.loads(line) for line in lines if '"sonar_engine.requests"' in line]
    return {line["request_id"]: line for line in logged}


def test_every_line_is_one_json_object_and_requests_tell_numbers_alone():
    with server_process(DRAFTING, log_format="json", log_requests=True, api_keys=(KEY,)) as server:
        private = talk(server)
        lines = ended(server)
    for line in lines:
        value = json.loads(line)
        assert re.fullmatch(UTC_TIME, value["time"])
        assert value["level"] == "INFO"
        assert {"logger", "message"} <= value.keys()
    assert any("ready in" in json.loads(line)["message"] for line in lines)
    assert not [text for text in private if text in "\n".join(lines)]
    logged = requests_of(lines)
    assert list(logged) == ['whole " = one', "streamed", "refused", "other", "health", "nobody", "gone"]
    whole, streamed = logged['whole " = one'], logged["streamed"]
    assert (whole["method"], whole["route"], whole["status"]) == ("POST", COMPLETIONS, 200)
    assert (whole["prompt_tokens"], whole["output_tokens"], whole["finish_reasons"]) == (len(PROMPT), 31, ["length"])
    assert whole["acceptance_length"] == 3.0
    assert 0 < whole["ttft_ms"] < whole["e2e_ms"] < 20_000
    assert str(whole["response_id"]).startswith("cmpl-")
    assert (streamed["output_tokens"], streamed["finish_reasons"]) == (14, ["length", "length"])
    assert (logged["refused"]["status"], logged["refused"]["error"]) == (400, "invalid_request_error")
    assert (logged["other"]["route"], logged["other"]["error"]) == ("/v1/models/{model_id:path}", "model_not_found")
    assert (logged["health"]["route"], logged["health"]["status"]) == ("/health", 200)
    assert (logged["nobody"]["status"], logged["nobody"]["error"]) == (401, "invalid_api_key")
    assert len(str(logged["nobody"]["route"])) == 200
    assert (logged["gone"]["status"], logged["gone"]["finish_reasons"]) == (499, ["abort"])
    assert "error" not in whole
    assert "ttft_ms" not in logged["refused"]


def test_text_lines_quote_what_could_be_taken_for_another_field_or_line():
    with server_process(DRAFTING, log_requests=True, api_keys=(KEY,)) as server:
        private = talk(server)
        lines = ended(server)
    assert all(re.match(f"{UTC_TIME} INFO ", line) for line in lines)
    assert not [text for text in private if text in "\n".join(lines)]
    logged = [line for line in lines if " request " in line and "request_id=" in line]
    assert len(logged) == 7
    assert 'request_id="whole \\" = one" method=POST route=/v1/completions status=200' in logged[0]
    assert "finish_reasons=length,length" in logged[1]


def test_requests_are_not_logged_unless_asked_for():
    with server_process(DRAFTING, api_keys=(KEY,)) as server:
        talk(server)
        lines = ended(server)
    assert not [line for line in lines if "request_id" in line]


def test_a_traceback_of_the_engines_process_is_one_object_and_so_is_what_ends_the_server():
    with server_process(FakeOptions(fail_after_steps=3), log_format="json") as server:
        httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "a"}, timeout=20)
        assert server.wait() == 1
        lines = [json.loads(line) for line in server.rest()]
    (failure,) = [line for line in lines if line["logger"] == "sonar_engine.engine_process"]
    assert failure["level"] == "ERROR"
    assert "RuntimeError: the fake engine fails as told" in failure["exception"]
    assert "Traceback" in failure["exception"]
    assert any("the engine died" in line["message"] for line in lines)


NOISY_FACTORY = """
import os, sys, warnings
from sonar_engine.testing.fake_engine import build_fake_engine

def build(config, progress):
    print("printed")
    warnings.warn("a library's warning")
    os.write(2, b'\\xff not UTF-8\\n{"time": 5}\\n' + b"x" * 100_000 + b"\\nwithout an end")
    return build_fake_engine(config, progress)
"""


def test_what_libraries_print_in_the_engines_process_is_wrapped(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "noisy.py").write_text(NOISY_FACTORY)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)
    with server_process(FakeOptions(), factory="noisy:build", log_format="json") as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.wait() == 1
        lines = [json.loads(line) for line in server.rest()]
    messages = [line["message"] for line in lines if line["logger"] == "sonar_engine.engine_process"]
    assert "printed" in messages
    assert "\ufffd not UTF-8" in messages
    assert '{"time": 5}' in messages
    assert sum(message.count("x") for message in messages if set(message) == {"x"}) == 100_000
    assert "without an end" in messages
    (warning,) = [line for line in lines if line["logger"] == "py.warnings"]
    assert "a library's warning" in warning["message"]
    assert warning["level"] == "WARNING"


def test_a_request_that_breaks_the_server_protocol_is_logged_as_json_too():
    with server_process(log_format="json") as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"nonsense\r\n\r\n")
            assert b"400" in client.recv(1000)
        lines = [json.loads(line) for line in ended(server)]
    (line,) = [line for line in lines if line["logger"] == "uvicorn.error"]
    assert (line["level"], line["message"]) == ("WARNING", "Invalid HTTP request received.")
