"""A server over the fake engine: in this process for contract tests, and as a real process over TCP."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from sonar_engine.engine_client import EngineClient
from sonar_engine.engine_connection import Launcher
from sonar_engine.server.app import create_app
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.state import ServerState
from sonar_engine.testing.byte_tokenizer import byte_tokenizer
from sonar_engine.testing.engine_thread import launch_thread
from sonar_engine.testing.fake_engine import FACTORY, FakeOptions

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
TOKENIZER = byte_tokenizer()


@dataclass
class Served:
    http: httpx.AsyncClient
    state: ServerState
    client: EngineClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def text(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """A completion's only choice."""
        response = await self.post(COMPLETIONS, prompt=prompt, **fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    async def events(self, path: str, **body: Any) -> Events:
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return Events.read(response.text)

    async def idle(self) -> bool:
        stats = await self.client.stats()
        return (stats.num_running, stats.num_waiting, stats.num_free_pages) == (0, 0, stats.num_pages)

    async def until_idle(self, seconds: float = 1.0) -> None:
        deadline = time.monotonic() + seconds
        while not (await self.idle() and not self.state.responses):
            assert time.monotonic() < deadline, "pages are still held"
            await asyncio.sleep(0.01)


@dataclass
class Events:
    """A stream's events. `chunks` are the JSON ones; the last line must be [DONE]."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    pings: int = 0

    @classmethod
    def read(cls, body: str) -> Events:
        events, done = cls(), False
        for block in body.split("\n\n"):
            assert not done or not block, "an event after [DONE]"
            if block.startswith(":"):
                events.pings += 1
            elif block == "data: [DONE]":
                done = True
            elif block:
                assert block.startswith("data: ") and "\n" not in block
                events.chunks.append(json.loads(block.removeprefix("data: ")))
        assert done
        return events

    def of(self, index: int) -> list[dict[str, Any]]:
        """The chunks' choices with this index."""
        return [choice for chunk in self.chunks for choice in chunk.get("choices", ()) if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in self.of(index))

    def finish(self, index: int = 0) -> str | None:
        reasons = [choice["finish_reason"] for choice in self.of(index) if choice["finish_reason"] is not None]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None


@asynccontextmanager
async def serving(
    options: FakeOptions | None = None,
    server: ServerConfig | None = None,
    defaults: dict[str, Any] | None = None,
    launch: Launcher = launch_thread,
    **config: Any,
) -> AsyncIterator[Served]:
    client = EngineClient((options or FakeOptions()).config(**config), FACTORY, launch, probe_timeout=0.5)
    await client.start()
    app = create_app(client, TOKENIZER, server, defaults)
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as http:
            yield Served(http, app.state.sonar, client)
    finally:
        await client.shutdown()


SERVER = """
import sys
from sonar_engine.config import EngineConfig
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.run import run_server
from sonar_engine.testing.byte_tokenizer import byte_tokenizer

engine = EngineConfig.model_validate_json(sys.argv[1])
server = ServerConfig.model_validate_json(sys.argv[2])
sys.exit(run_server(engine, server, sys.argv[3], lambda config: byte_tokenizer()))
"""


class ServerProcess:
    """A server as its users meet it. `log` is what it wrote, once it has ended."""

    def __init__(
        self, options: FakeOptions | None = None, wait: bool = True, factory: str = FACTORY, **server: Any
    ) -> None:
        engine = (options or FakeOptions()).config().model_dump_json()
        config = ServerConfig(port=server.pop("port", 0), **server).model_dump_json()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, engine, config, factory], stderr=subprocess.PIPE, text=True, bufsize=1
        )
        self.lines: list[str] = []
        self.url = ""
        if wait:
            self.read_until("ready in")
            self.url = re.findall(r"https?://[^\s\"]+", self.lines[-1])[-1]

    def read_until(self, text: str) -> str:
        """The log line that holds `text`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if text in line:
                return line
        raise AssertionError(f"the server ended without saying {text!r}: {self.lines}")

    def rest(self) -> list[str]:
        """All lines, until its end."""
        assert self.process.stderr is not None
        self.lines += [line.rstrip() for line in self.process.stderr]
        return self.lines

    def wait(self, timeout: float = 10.0) -> int:
        return self.process.wait(timeout)

    def children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def engine_pid(self) -> int:
        (pid,) = self.children()
        return pid

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def server_process(options: FakeOptions | None = None, **server: Any) -> Iterator[ServerProcess]:
    process = ServerProcess(options, **server)
    try:
        yield process
    finally:
        process.end()
