"""The start of an engine's process, and the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

MAX_SOCKET_PATH = 100  # bytes; the kernel allows 107


class EngineHandle(Protocol):
    """A started engine's process."""

    @property
    def pid(self) -> int: ...
    async def wait(self) -> int: ...
    def kill(self) -> None: ...


Launcher = Callable[[str, str], Awaitable[EngineHandle]]  # (endpoint, factory)


async def launch_process(endpoint: str, factory: str) -> EngineHandle:
    """A fresh interpreter, so that the caller's main module is not imported again."""
    arguments = ["--endpoint", endpoint, "--parent", str(os.getpid()), "--factory", factory]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sonar_engine.engine_process", *arguments, stdin=asyncio.subprocess.DEVNULL
    )


class EngineConnection:
    """A bound socket in a private folder, and the process at its other end."""

    def __init__(
        self, folder: Path, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, handle: EngineHandle
    ) -> None:
        self.folder = folder
        self.context = context
        self.socket = socket
        self.handle = handle

    @classmethod
    async def open(cls, launch: Launcher, factory: str) -> EngineConnection:
        folder = _private_folder()
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PAIR)
        try:
            socket.set_hwm(0)  # the sender never blocks; what is in flight is bounded by the requests' max_tokens
            socket.setsockopt(zmq.LINGER, 0)
            endpoint = f"ipc://{folder / 'engine'}"
            socket.bind(endpoint)
            return cls(folder, context, socket, await launch(endpoint, factory))
        except BaseException:
            socket.close(0)
            context.term()
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.handle.kill()

    async def close(self) -> None:
        self.kill()
        await self.handle.wait()
        self.socket.close(0)
        self.context.term()
        shutil.rmtree(self.folder, ignore_errors=True)


def _private_folder() -> Path:
    """A new folder of mode 0700 whose path leaves room for a socket's name."""
    folder = Path(tempfile.mkdtemp(prefix="sonar-"))
    if len(str(folder / "engine").encode()) <= MAX_SOCKET_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="sonar-", dir="/tmp"))
