"""What the engine's process writes, as lines of the server's log."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import msgspec

from sonar_engine.engine_connection import EngineHandle, launch_process
from sonar_engine.logs import LogFormat, json_line

MAX_LINE_BYTES = 1 << 16
LOGGER = "sonar_engine.engine_process"


class LaunchLogged:
    """A launcher. As text the process writes where the server does; as JSON its lines pass through here."""

    def __init__(self, log_format: LogFormat) -> None:
        self._format = log_format

    async def __call__(self, endpoint: str, factory: str) -> EngineHandle:
        if self._format == "text":
            return await launch_process(endpoint, factory)
        process = await launch_process(endpoint, factory, self._format, output=asyncio.subprocess.PIPE)
        if process.stdout is None:
            raise RuntimeError("a process with a pipe has no output")
        return _LoggedProcess(process, asyncio.create_task(_copy_lines(process.stdout, _write_line)))


class _LoggedProcess:
    """A process that has ended once its last line is written."""

    def __init__(self, process: asyncio.subprocess.Process, copying: asyncio.Task[None]) -> None:
        self._process = process
        self._copying = copying

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        code = await self._process.wait()
        await asyncio.wait([self._copying], timeout=1.0)  # a child of its own may hold the pipe open
        return code

    def kill(self) -> None:
        self._process.kill()


async def _copy_lines(reader: asyncio.StreamReader, write: Callable[[bytes], None]) -> None:
    """Whole lines, or pieces of those that are longer than MAX_LINE_BYTES."""
    rest = b""
    while part := await reader.read(MAX_LINE_BYTES):
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) >= MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            write(line)
    if rest:
        write(rest)


def _write_line(line: bytes) -> None:
    """An object as it is; what libraries and the interpreter print becomes the message of one."""
    text = line.decode(errors="replace").rstrip()
    if text:
        print(text if _is_log_object(line) else json_line(time.time(), "INFO", LOGGER, text, {}), file=sys.stderr)


def _is_log_object(line: bytes) -> bool:
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.keys() >= {"time", "level", "logger", "message"}
