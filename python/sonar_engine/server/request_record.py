"""What is known of one HTTP request: filled while it is served, read by the log and the tracer at its end."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from starlette.types import Scope

from sonar_engine.server.errors import ApiError

if TYPE_CHECKING:
    from sonar_engine.server.generation import Generation

MAX_ID_LEN = 128
GONE = 499  # as proxies log it: the client left before it had the whole answer

Operation = Literal["chat", "text_completion"]


@dataclass
class RequestRecord:
    """`request_id` is the client's own, or made here; it names the request in logs and is no handle for anything."""

    scope: Scope
    request_id: str
    has_own_id: bool
    started_at: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)
    ended_at: float | None = None
    status: int | None = None  # None: no response was begun
    error: str | None = None  # the code of what went wrong
    client_gone: bool = False
    operation: Operation | None = None
    generation: Generation | None = None

    @classmethod
    def of_scope(cls, scope: Scope) -> RequestRecord:
        """Puts the record where `record_of` finds it. A header that is no id is refused later, see `check_own_id`."""
        own = own_id(scope)
        record = cls(scope, uuid.uuid4().hex if own is None or not is_id(own) else own, has_own_id=own is not None)
        scope.setdefault("state", {})["record"] = record
        return record

    def name(self, request_id: str) -> None:
        """The id that a body asks for; that of the header goes before it."""
        if not self.has_own_id:
            self.request_id, self.has_own_id = request_id, True

    def end(self) -> None:
        self.ended_at = time.monotonic()

    @property
    def route(self) -> str:
        """The route's pattern, or the path where there is none."""
        route = self.scope.get("route")
        return str(getattr(route, "path", None) or self.scope["path"][:200])

    def log_fields(self) -> dict[str, Any]:
        """Numbers and names, never text of the prompt or the answer, never a key. Absent where nothing is known."""
        ended_at = time.monotonic() if self.ended_at is None else self.ended_at
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.scope["method"],
            "route": self.route,
            "status": GONE if self.client_gone else self.status,
            "error": self.error,
            "e2e_ms": _milliseconds(ended_at - self.started_at),
        }
        if self.generation is not None:
            fields |= self._of_generation(self.generation)
        return {name: value for name, value in fields.items() if value is not None}

    def _of_generation(self, generation: Generation) -> dict[str, Any]:
        first, total = generation.first_token_at, generation.total_metrics()
        return {
            "response_id": generation.response_id,
            "prompt_tokens": generation.num_prompt_tokens,
            "output_tokens": generation.num_output_tokens,
            "finish_reasons": generation.finish_reasons(),
            "ttft_ms": None if first is None else _milliseconds(first - self.started_at),
            "queue_ms": None if total is None else _milliseconds(total.queue_time),
            "acceptance_length": None if total is None else _rounded(total.speculation.mean_acceptance_length),
        }


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request that is being served."""
    record: RequestRecord = scope["state"]["record"]
    return record


def own_id(scope: Scope) -> str | None:
    """The `X-Request-Id` that the client sent."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return str(value.decode("latin-1"))
    return None


def is_id(text: str) -> bool:
    return 1 <= len(text) <= MAX_ID_LEN and text.isascii() and text.isprintable()


def check_own_id(scope: Scope) -> None:
    """Raises the 400 of a header that is no id."""
    own = own_id(scope)
    if own is not None and not is_id(own):
        raise ApiError(400, f"X-Request-Id must be 1 to {MAX_ID_LEN} printable ASCII characters", "X-Request-Id")
