"""An engine's loop in a thread of the caller's process: the same wire, without the start of a process."""

from __future__ import annotations

import asyncio
import os
import threading

from sonar_engine.engine_process import load_factory, serve


class EngineThread:
    """A handle like that of a process. `kill` lets go of a loop that waits for messages."""

    def __init__(self, endpoint: str, factory: str) -> None:
        self.pid = os.getpid()
        self._released = threading.Event()
        self._code = 1
        self._thread = threading.Thread(target=self._run, args=(endpoint, factory), daemon=True)
        self._thread.start()

    def _run(self, endpoint: str, factory: str) -> None:
        self._code = serve(endpoint, load_factory(factory), lambda: not self._released.is_set())

    async def wait(self) -> int:
        while self._thread.is_alive():
            await asyncio.sleep(0.01)
        return self._code

    def kill(self) -> None:
        self._released.set()


async def launch_thread(endpoint: str, factory: str) -> EngineThread:
    """A launcher for `EngineClient`."""
    return EngineThread(endpoint, factory)
