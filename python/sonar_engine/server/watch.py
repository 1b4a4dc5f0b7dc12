"""The outermost layer: every request has an id, and is told of at its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sonar_engine.server.request_record import RequestRecord

OnEnd = Callable[[RequestRecord], None]

logger = logging.getLogger("sonar_engine.requests")


class RequestWatch:
    """An ASGI layer that keeps a request's record and hands it to `on_end` once the answer is out."""

    def __init__(self, app: ASGIApp, on_end: Sequence[OnEnd]) -> None:
        self._app = app
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.of_scope(scope)

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        finally:
            record.end()
            for tell in self._on_end:
                tell(record)


def log_request(record: RequestRecord) -> None:
    """One line a request."""
    logger.info("request", extra={"fields": record.log_fields()})
