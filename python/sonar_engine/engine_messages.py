"""What crosses between the front end and the engine's process: small typed messages in msgpack, never pickle."""

from __future__ import annotations

import msgspec

from sonar_engine import errors
from sonar_engine.events import StepEvents
from sonar_engine.types import EngineInfo, EngineStats, SamplingParams


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message; its class is its tag."""


class ErrorReport(msgspec.Struct, frozen=True, array_like=True):
    """An error of `sonar_engine.errors` as data. `kind` is its class."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        if isinstance(error, errors.InvalidRequestError):
            return cls("InvalidRequestError", str(error), error.param, error.code)
        if isinstance(error, errors.SonarError):
            return cls(type(error).__name__, str(error))
        return cls("EngineDeadError", f"{type(error).__name__}: {error}")

    def to_error(self) -> errors.SonarError:
        """The same error on this side; a kind this side does not know becomes `EngineDeadError`."""
        if self.kind == "InvalidRequestError":
            return errors.InvalidRequestError(self.message, self.param, self.code)
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, errors.SonarError):
            return kind(self.message)
        return errors.EngineDeadError(self.message)


# Front end to engine


class Configure(Message, frozen=True):
    """The first message: an `EngineConfig` as JSON."""

    config: str


class Sequence(msgspec.Struct, frozen=True, array_like=True):
    request_id: int
    prompt: bytes  # int32 [P]
    params: SamplingParams


class Submit(Message, frozen=True):
    """Sequences that are accepted or rejected together."""

    call_id: int
    sequences: list[Sequence]


class Abort(Message, frozen=True):
    request_ids: list[int]


class Probe(Message, frozen=True):
    """Answered once a step has run after its arrival."""

    call_id: int


class GetStats(Message, frozen=True):
    call_id: int


class ResetPrefixCache(Message, frozen=True):
    call_id: int


class Shutdown(Message, frozen=True):
    pass


# Engine to front end


class Progress(Message, frozen=True):
    """Loading: `done` of `total` units of `stage`."""

    stage: str
    done: int
    total: int


class Ready(Message, frozen=True):
    info: EngineInfo


class Accepted(Message, frozen=True):
    call_id: int


class Rejected(Message, frozen=True):
    call_id: int
    error: ErrorReport


class Events(Message, frozen=True):
    """All events of one step."""

    events: StepEvents


class ProbeReply(Message, frozen=True):
    call_id: int


class StatsReply(Message, frozen=True):
    call_id: int
    stats: EngineStats


class PrefixCacheReset(Message, frozen=True):
    call_id: int
    done: bool


class Fatal(Message, frozen=True):
    """The last message of an engine that cannot start or go on."""

    error: ErrorReport


ToEngine = Configure | Submit | Abort | Probe | GetStats | ResetPrefixCache | Shutdown
ToFrontEnd = Progress | Ready | Accepted | Rejected | Events | ProbeReply | StatsReply | PrefixCacheReset | Fatal
