"""The start of an engine's process, and the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from sonar_engine.logs import LogFormat

MAX_SOCKET_PATH = 100  # bytes; the kernel allows 107
FOLDER_PREFIX = "sonar-"
SOCKET_NAME = "engine"


class EngineHandle(Protocol):
    """A started engine's process."""

    @property
    def pid(self) -> int: ...
    async def wait(self) -> int: ...
    def kill(self) -> None: ...


Launcher = Callable[[str, str], Awaitable[EngineHandle]]  # (endpoint, factory)


async def launch_process(
    endpoint: str, factory: str, log_format: LogFormat = "text", output: int | None = None
) -> asyncio.subprocess.Process:
    """A fresh interpreter, so that the caller's main module is not imported again.

    What it writes goes where this process writes, or to `output`, as `subprocess` has it.
    """
    arguments = ["--endpoint", endpoint, "--parent", str(os.getpid()), "--factory", factory, "--log-format", log_format]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sonar_engine.engine_process",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else asyncio.subprocess.STDOUT,
    )


class SocketFolder:
    """A new folder of mode 0700 for the socket, locked by this process until it ends or removes it.

    The lock is the folder's own, and is taken before the socket is there: a folder with a socket and without a
    lock is one whose owner was killed.
    """

    def __init__(self) -> None:
        self.path = _private_folder()
        self._lock = os.open(self.path, os.O_RDONLY)
        _try_lock(self._lock)

    @property
    def socket_path(self) -> Path:
        return self.path / SOCKET_NAME

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


class EngineConnection:
    """A bound socket in a private folder, and the process at its other end."""

    def __init__(
        self, folder: SocketFolder, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, handle: EngineHandle
    ) -> None:
        self.folder = folder
        self.context = context
        self.socket = socket
        self.handle = handle

    @classmethod
    async def open(cls, launch: Launcher, factory: str) -> EngineConnection:
        folder = SocketFolder()
        remove_stale_folders(folder.path.parent)
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PAIR)
        try:
            socket.set_hwm(0)  # the sender never blocks; what is in flight is bounded by the requests' max_tokens
            socket.setsockopt(zmq.LINGER, 0)
            endpoint = f"ipc://{folder.socket_path}"
            socket.bind(endpoint)
            return cls(folder, context, socket, await launch(endpoint, factory))
        except BaseException:
            socket.close(0)
            context.term()
            folder.remove()
            raise

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.handle.kill()

    async def close(self) -> None:
        self.kill()
        await self.handle.wait()
        self.socket.close(0)
        self.context.term()
        self.folder.remove()

    def abandon(self) -> None:
        """For a process that ends at once: nothing is waited for."""
        self.kill()
        self.folder.remove()


def remove_stale_folders(parent: Path) -> None:
    """Removes what this user's killed processes left in `parent`: folders with nothing but a socket, not locked."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, another user's, or no folder
            if folder.lstat().st_uid == os.getuid() and os.listdir(folder) == [SOCKET_NAME]:
                _remove_if_unlocked(folder)


def _remove_if_unlocked(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if stat.S_ISSOCK((folder / SOCKET_NAME).lstat().st_mode) and _try_lock(lock):
            (folder / SOCKET_NAME).unlink()
            folder.rmdir()
    finally:
        os.close(lock)


def _try_lock(descriptor: int) -> bool:
    """False where another process holds the lock, or the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _private_folder() -> Path:
    """A new folder whose path leaves room for a socket's name."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    if len(str(folder / SOCKET_NAME).encode()) <= MAX_SOCKET_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp"))
