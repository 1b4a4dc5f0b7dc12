"""Where a way of speculating is registered: one line a method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sonar_engine.drafters.base import Drafter
from sonar_engine.drafters.ngram import NgramDrafter
from sonar_engine.drafters.plain import PlainDrafter
from sonar_engine.errors import ConfigError

if TYPE_CHECKING:
    from sonar_engine._scheduler import Scheduler
    from sonar_engine.config import EngineConfig


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may be built from."""

    config: EngineConfig
    scheduler: Scheduler
    device: torch.device


DRAFTERS: dict[str, Callable[[DrafterContext], Drafter]] = {
    "none": lambda context: PlainDrafter(),
    "ngram": lambda context: NgramDrafter(
        context.scheduler, context.config.speculative, context.config.max_num_seqs, context.device
    ),
}


def build_drafter(context: DrafterContext) -> Drafter:
    """Raises ConfigError for a method that is not registered."""
    method = context.config.speculative.method
    if method not in DRAFTERS:
        raise ConfigError(f"speculative method {method!r} is unknown; known: {', '.join(sorted(DRAFTERS))}")
    return DRAFTERS[method](context)
