"""Where a way of speculating is registered: one line a method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sonar_engine.drafters.base import Drafter
from sonar_engine.drafters.draft_model import DraftModelDrafter
from sonar_engine.drafters.draft_source import draft_kv_bytes_per_token
from sonar_engine.drafters.mtp import MtpDrafter
from sonar_engine.drafters.mtp_source import head_kv_bytes_per_token
from sonar_engine.drafters.ngram import NgramDrafter
from sonar_engine.drafters.oracle import OracleDrafter
from sonar_engine.drafters.plain import PlainDrafter
from sonar_engine.errors import ConfigError

if TYPE_CHECKING:
    from sonar_engine._scheduler import Scheduler
    from sonar_engine.config import EngineConfig
    from sonar_engine.device import Device
    from sonar_engine.model_runner import ModelRunner
    from sonar_engine.models.registry import ResolvedModel
    from sonar_engine.sampling.state import SamplingState
    from sonar_engine.schedules.orders import ScheduleName
    from sonar_engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may be built from."""

    config: EngineConfig
    scheduler: Scheduler
    runner: ModelRunner  # of the target
    sampling: SamplingState
    device: Device


def no_kv(config: EngineConfig, target: ResolvedModel, tokenizer: Tokenizer) -> int:
    """The drafter has no KV cache."""
    return 0


@dataclass(frozen=True)
class DrafterMethod:
    """How a method's drafter is built, the bytes a token that it adds to the KV cache, the order of its steps, and
    `Drafter.needs_hidden`.

    The bytes are asked for before any weight is read: what cannot work with the target is to be refused there.
    Under the schedule `plain` a drafter's `ingest` is never called. A drafter that reads hidden states pairs each with
    the next token, so that the content of a page depends on the token after it; the scheduler must know.
    """

    build: Callable[[DrafterContext], Drafter]
    kv_bytes_per_token: Callable[[EngineConfig, ResolvedModel, Tokenizer], int] = no_kv
    schedule: ScheduleName = "draft_target"
    needs_hidden: Literal["none", "last", "aux"] = "none"


DRAFTERS: dict[str, DrafterMethod] = {
    "none": DrafterMethod(lambda context: PlainDrafter(), schedule="plain"),
    "ngram": DrafterMethod(NgramDrafter.build, schedule="plain"),
    "draft_model": DrafterMethod(DraftModelDrafter.build, draft_kv_bytes_per_token),
    "mtp": DrafterMethod(MtpDrafter.build, head_kv_bytes_per_token, schedule="mtp", needs_hidden="last"),
    "oracle": DrafterMethod(OracleDrafter.build, schedule="plain"),
}


def drafter_method(config: EngineConfig) -> DrafterMethod:
    """Raises ConfigError for a method that is not registered."""
    method = config.speculative.method
    if method not in DRAFTERS:
        raise ConfigError(f"speculative method {method!r} is unknown; known: {', '.join(sorted(DRAFTERS))}")
    return DRAFTERS[method]
