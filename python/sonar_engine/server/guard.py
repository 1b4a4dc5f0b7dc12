"""What every request passes before a route sees it: header limits, keys, body limit; and errors on the way out."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sonar_engine.server.dashboard import PAGE_FILES
from sonar_engine.server.errors import ApiError, api_error
from sonar_engine.server.request_record import check_own_id, record_of
from sonar_engine.server.state import ServerState
from sonar_engine.server.streaming import ClientGoneError

OPEN_PATHS = frozenset({"/health", "/ready", *PAGE_FILES})
ADMIN_PATHS = frozenset({"/abort", "/reset_prefix_cache"})

logger = logging.getLogger(__name__)


def error_response(error: Exception, scope: Scope) -> Response:
    """The JSON answer for any exception, which the request's record keeps."""
    shown = api_error(error)
    record_of(scope).error = shown.name
    return Response(shown.body(), shown.status, shown.headers, media_type="application/json")


class Guard:
    """The ASGI layer before the routes. It also counts the requests under way."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = [key.encode() for key in state.config.api_keys]
        admin = state.config.admin_key
        self._admin_keys = [] if admin is None else [admin.encode()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        self._state.num_in_flight += 1
        try:
            self._check(scope)
            await self._app(scope, receive, watched_send)
        except (ClientGoneError, ClientDisconnect):
            record_of(scope).client_gone = True  # nobody is left to be told
        except Exception as error:
            if not isinstance(error, ApiError):
                record = record_of(scope)
                fields = {"request_id": record.request_id, "method": scope["method"], "route": record.route}
                logger.exception("a request failed", extra={"fields": fields})
            if started:
                raise
            await error_response(error, scope)(scope, receive, send)
        finally:
            self._state.num_in_flight -= 1

    def _check(self, scope: Scope) -> None:
        config = self._state.config
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if len(headers) > config.max_header_count:
            raise ApiError(431, f"{len(headers)} headers; at most {config.max_header_count} are possible")
        size = sum(len(name) + len(value) for name, value in headers)
        if size > config.max_header_bytes:
            raise ApiError(431, f"{size} bytes of headers; at most {config.max_header_bytes} are possible")
        check_own_id(scope)
        self._check_key(scope["path"].rstrip("/") or "/", headers)

    def _check_key(self, path: str, headers: list[tuple[bytes, bytes]]) -> None:
        if path in OPEN_PATHS:
            return
        given = b""
        for name, value in headers:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                given = given.strip() if scheme.lower() == b"bearer" else b""
        if path in ADMIN_PATHS:
            if not self._admin_keys:
                raise ApiError(403, "admin routes are off; start the server with --admin-key", code="admin_disabled")
            if not _matches(given, self._admin_keys):
                raise ApiError(401, "the admin key is missing or wrong", code="invalid_api_key")
        elif self._keys and not _matches(given, [*self._keys, *self._admin_keys]):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _matches(given: bytes, keys: Iterable[bytes]) -> bool:
    """Every key is compared, in constant time, whichever matches."""
    return any([hmac.compare_digest(given, key) for key in keys])


async def read_body(request: Request, limit: int) -> bytes:
    """The JSON body. Raises 415 for another content type and 413 beyond `limit` bytes."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body must be application/json, not {kind[:80] or 'without a type'}")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise ApiError(413, f"the body has {declared} bytes; at most {limit} are possible")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise ApiError(413, f"the body is larger than {limit} bytes")
        parts.append(part)
    return b"".join(parts)
