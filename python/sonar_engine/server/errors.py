"""Errors as the API says them: one JSON shape, the right status, never 422."""

from __future__ import annotations

import msgspec

from sonar_engine.errors import EngineDeadError, InvalidRequestError, QueueFullError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
RETRY_AFTER_SECONDS = {429: 1, 503: 2}


class ApiError(Exception):
    """A failure with its HTTP status; `param` names the field, `code` the kind."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if status in RETRY_AFTER_SECONDS:
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_SECONDS[status]))

    @property
    def kind(self) -> str:
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def name(self) -> str:
        """The narrowest name there is for it."""
        return self.code or self.kind

    def body(self) -> bytes:
        """The JSON object, also what an error event carries."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class ServerStoppingError(EngineDeadError):
    """The server ends and gives up what still runs."""


class RequestTimeoutError(EngineDeadError):
    """A request took longer than the server allows."""


def api_error(error: Exception) -> ApiError:
    """The API's view of any exception."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, str(error), error.param, error.code)
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full")
        case ServerStoppingError():
            return ApiError(503, str(error), code="server_stopping")
        case RequestTimeoutError():
            return ApiError(504, str(error), code="request_timeout")
        case EngineDeadError():
            return ApiError(500, str(error), code="engine_dead")
        case _:
            return ApiError(500, "the server failed; its log says why", code="internal_error")
