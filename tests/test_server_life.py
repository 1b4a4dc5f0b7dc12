"""A real server process over TCP: loading, disconnects, drains, and the engine's death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from server_harness import CHAT, COMPLETIONS, HELLO, Events, ServerProcess, server_process
from sonar_engine.errors import ConfigError
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.run import run_server
from sonar_engine.server.startup import StatsLine, options_line
from sonar_engine.testing.fake_engine import FakeEngine, FakeOptions

SLOW = FakeOptions(step_seconds=0.01)


def metric(server: ServerProcess, name: str) -> float:
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith(f"sonar_{name} "):
            return float(line.split()[-1])
    raise AssertionError(f"no metric {name}")


def until(condition: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.02)


def test_start_up_says_what_runs_and_where():
    with server_process(SLOW, served_model_name="tiny", api_keys=("secret",)) as server:
        text = "\n".join(server.lines)
    assert "Sonar Engine " in text
    (options,) = [line for line in server.lines if "options:" in line]
    assert "served_model_name=tiny" in options and "secret" not in text
    assert "float32 on cpu" in text
    assert "4096 pages, 65536 tokens: 32.0 sequences of 2048 tokens" in text
    assert "no drafting" in text
    assert "ready in" in server.lines[-1] and server.url.startswith("http://127.0.0.1:")


def test_while_loading_the_server_answers_that_it_is_loading():
    port = free_port()
    server = ServerProcess(FakeOptions(load_seconds=1.5), wait=False, port=port)
    try:
        server.read_until("options:")
        url = f"http://127.0.0.1:{port}"
        until(lambda: status(f"{url}/ready") == 503, 5.0)
        assert status(f"{url}/health") == status(f"{url}/v1/models") == 503
        server.read_until("ready in")
        assert status(f"{url}/ready") == status(f"{url}/health") == 200
    finally:
        server.end()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def status(url: str) -> int | None:
    try:
        return httpx.get(url, timeout=6).status_code
    except httpx.TransportError:
        return None


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_line():
    server = ServerProcess(FakeOptions(load_error="no such folder: give another"), wait=False)
    try:
        assert server.read_until("no such folder")
        assert server.wait() == 1
    finally:
        server.end()


def test_a_signal_while_loading_ends_the_server_and_its_engine():
    server = ServerProcess(FakeOptions(load_seconds=30), wait=False)
    try:
        server.read_until("options:")
        until(lambda: len(server.children()) == 1, 5.0)
        (engine,) = server.children()
        server.process.terminate()
        assert server.wait() == 0
        until(lambda: not alive(engine), 2.0)
    finally:
        server.end()


def test_an_address_in_use_is_a_one_line_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            run_server(SLOW.config(), ServerConfig(port=taken.getsockname()[1]))


def test_of_64_streams_a_third_hang_up_and_no_page_stays_held():
    with server_process(FakeOptions(step_seconds=0.005, tokens_per_step=2)) as server:
        finished, dropped = asyncio.run(run_streams(server.url))
        assert (finished, dropped) == (42, 22)
        until(lambda: metric(server, "num_requests_running") == 0, 1.0)
        assert metric(server, "kv_cache_usage_perc") == 0 == metric(server, "num_requests_waiting")
        load = httpx.get(f"{server.url}/load").json()
        assert load == {"server_load": 0, "num_open_sequences": 0}


async def run_streams(url: str) -> tuple[int, int]:
    """(streams read to the end, streams dropped after a few chunks)"""
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as http:

        async def one(index: int) -> bool:
            body = {"prompt": f"p{index}", "max_tokens": 300 if index % 3 == 0 else 60, "stream": True}
            async with http.stream("POST", COMPLETIONS, json=body) as response:
                lines = []
                async for line in response.aiter_lines():
                    lines.append(line)
                    if index % 3 == 0 and len(lines) > 6:
                        return False
            return lines[-2:] == ["data: [DONE]", ""]

        results = await asyncio.gather(*(one(index) for index in range(64)))
    return sum(results), len(results) - sum(results)


def test_a_dropped_whole_answer_frees_its_pages():
    with server_process(SLOW) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "a", "max_tokens": 2000}, timeout=0.3)
        until(lambda: metric(server, "num_requests_running") == 0, 1.0)


class Background:
    """A streamed request in a thread."""

    def __init__(self, url: str, **body: object) -> None:
        self.body = ""
        self.started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url, body))
        self._thread.start()
        assert self.started.wait(5)

    def _run(self, url: str, body: dict) -> None:
        asked = {"messages": HELLO, "stream": True, **body}
        with (
            contextlib.suppress(httpx.TransportError),  # a body cut short is told by `events`
            httpx.stream("POST", f"{url}{CHAT}", json=asked, timeout=30) as response,
        ):
            for part in response.iter_text():
                self.body += part
                self.started.set()

    def events(self) -> Events:
        self._thread.join(20)
        return Events.read(self.body)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_finishes_what_runs_and_refuses_what_is_new(number):
    with server_process(SLOW, shutdown_timeout=10) as server:
        running = Background(server.url, max_tokens=120)
        server.process.send_signal(number)
        until(lambda: status(f"{server.url}/ready") == 503, 1.0)
        refused = httpx.post(f"{server.url}{CHAT}", json={"messages": HELLO})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert running.events().finish() == "length"
        assert server.wait() == 0


def test_a_drain_that_takes_too_long_gives_the_rest_an_error_event():
    with server_process(SLOW, shutdown_timeout=0.3) as server:
        running = Background(server.url, max_tokens=2000)
        server.process.terminate()
        error = running.events().chunks[-1]["error"]
        assert error["code"] == "server_stopping" and error["type"] == "service_unavailable_error"
        assert server.wait() == 0


def test_a_second_signal_ends_it_at_once_and_leaves_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with server_process(SLOW, shutdown_timeout=60) as server:
        engine = server.engine_pid()
        thread = Background(server.url, max_tokens=2000)
        server.process.terminate()
        until(lambda: status(f"{server.url}/ready") == 503, 1.0)
        server.process.terminate()
        assert server.wait() == 128 + signal.SIGTERM  # long before the drain may end
        with pytest.raises(AssertionError):
            thread.events()
        until(lambda: not alive(engine), 2.0)
    assert list(tmp_path.iterdir()) == []


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_killed_engine_ends_streams_with_an_error_and_the_server_with_code_1():
    with server_process(SLOW) as server:
        streams = [Background(server.url) for _ in range(3)]
        os.kill(server.engine_pid(), signal.SIGKILL)
        for stream in streams:
            assert stream.events().chunks[-1]["error"]["code"] == "engine_dead"
        assert server.wait() == 1


def test_a_killed_engine_is_started_again_by_option():
    with server_process(SLOW, on_engine_death="restart") as server:
        first = server.engine_pid()
        stream = Background(server.url)
        os.kill(first, signal.SIGKILL)
        assert stream.events().chunks[-1]["error"]["code"] == "engine_dead"
        server.read_until("ready again")
        assert status(f"{server.url}/health") == 200 and server.engine_pid() != first
        answer = httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "a"}).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        server.process.terminate()
        assert server.wait() == 0


def test_a_stuck_engine_fails_health_within_five_seconds():
    with server_process(SLOW) as server:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        began = time.monotonic()
        assert status(f"{server.url}/health") == 503
        assert time.monotonic() - began < 5.0


def test_a_stuck_engine_is_declared_dead_and_its_streams_are_told():
    options = FakeOptions(step_seconds=0.01, hang_after_steps=20)
    with server_process(options, engine_hang_timeout=1.0, probe_timeout=0.5) as server:
        stream = Background(server.url)
        assert stream.events().chunks[-1]["error"]["code"] == "engine_dead"
        assert server.wait() == 1


def test_a_busy_server_logs_a_line_of_statistics():
    with server_process(FakeOptions(step_seconds=0.01, tokens_per_step=3), stats_interval=0.2) as server:
        stream = Background(server.url, max_tokens=300)
        line = server.read_until("acceptance length")
        stream.events()
    for part in ("prompt ", "generation ", "running 1", "waiting 0", "KV ", "prefix hits", "drafted", "per position"):
        assert part in line


def test_an_idle_server_logs_nothing():
    engine = FakeEngine(SLOW.config(), SLOW)
    line = StatsLine()
    assert line.next(engine.stats()) is None and line.next(engine.stats()) is None


def test_the_options_line_shows_what_differs_from_the_defaults():
    server = ServerConfig(api_keys=("a", "b"), admin_key="c", port=9)
    line = options_line(SLOW.config(max_num_seqs=7), server)
    assert "max_num_seqs=7" in line and "port=9" in line and "host" not in line
    assert "api_keys=(2 keys)" in line and "admin_key=(1 key)" in line
