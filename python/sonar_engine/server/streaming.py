"""Server-sent events, and what happens when the reader goes away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sonar_engine.errors import SonarError
from sonar_engine.server.choice import Choice, ChoiceDelta
from sonar_engine.server.errors import api_error
from sonar_engine.server.generation import Generation
from sonar_engine.server.request_record import RequestRecord, record_of

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


async def unless_gone(work: Coroutine[Any, Any, Result], receive: Callable[[], Awaitable[Any]]) -> Result:
    """The result of `work`, which is cancelled, and ClientGoneError raised, when the client goes away."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientGoneError
    finally:
        for task in (worker, watcher):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ChunkWriter(Protocol):
    """Renders one response's events; each method gives whole events, or nothing."""

    def opening(self) -> bytes: ...
    def delta(self, choice: Choice, delta: ChoiceDelta) -> bytes: ...
    def closing(self) -> bytes: ...


class EventStream(Response):
    """The events of an opened generation. Closes it at the end, whichever end it is."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, writer: ChunkWriter, ping_interval: float) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer
        self._ping_interval = ping_interval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self._send_all(send, record_of(scope)), receive)
        finally:
            self._generation.close()

    async def _send_all(self, send: Send, record: RequestRecord) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for events in self._events(record):
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, record: RequestRecord) -> AsyncIterator[bytes]:
        writer = self._writer
        yield writer.opening()
        try:
            async for deltas in self._generation.deltas(self._ping_interval):
                events = b"".join([writer.delta(choice, delta) for choice, delta in deltas])
                if events or not deltas:
                    yield events or PING
        except Exception as error:
            shown = api_error(error)
            record.error = shown.name
            if not isinstance(error, SonarError):
                logger.exception("a stream failed", extra={"fields": {"request_id": record.request_id}})
            yield b"data: " + shown.body() + b"\n\n"
        else:
            yield writer.closing()
        yield DONE
