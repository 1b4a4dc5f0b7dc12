"""Counters of the engine's loop: time by stage, tokens, acceptance. One vectorised update a step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sonar_engine._scheduler import Events
    from sonar_engine.step_buffers import BatchMetadata

STAGES = ("plan", "draft", "verify", "ingest", "commit")


class StepStatistics:
    """Totals since start. `start()` opens a step, `lap(stage)` books the time since the last mark to a stage."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.num_steps = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.step_seconds = dict.fromkeys(STAGES, 0.0)
        self._accepted_exactly = np.zeros(max_draft_tokens + 1, np.int64)  # [i] = verifications that accepted i drafts
        self._mark = 0.0
        self._ended_at: float | None = None  # the last step
        self.last_step_seconds: float | None = None  # from the end of the step before; None: it did not follow one

    def start(self) -> None:
        self._mark = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.step_seconds[stage] += now - self._mark
        self._mark = now

    def end_step(self) -> float | None:
        """A step's verdict has arrived: sets and gives `last_step_seconds`."""
        now = time.perf_counter()
        self.last_step_seconds = None if self._ended_at is None else now - self._ended_at
        self._ended_at = now
        return self.last_step_seconds

    def rest(self) -> None:
        """There is no work: the next step follows none."""
        self._ended_at = None

    def count(self, batch: BatchMetadata, events: Events) -> None:
        """Books a committed step: tokens prefilled, generated, drafted and accepted."""
        self.num_steps += 1
        self.prompt_tokens += batch.num_tokens - batch.num_decode_tokens
        self.generation_tokens += len(events.tokens)
        drafted = np.asarray(events.num_drafted)
        accepted = np.asarray(events.num_accepted)[drafted > 0]
        self.num_drafts += len(accepted)
        self.num_draft_tokens += int(drafted.sum())
        self.num_accepted_tokens += int(accepted.sum())
        if len(accepted):
            self._accepted_exactly += np.bincount(accepted, minlength=len(self._accepted_exactly))

    @property
    def accepted_per_pos(self) -> list[int]:
        """[j] = drafts accepted at position j (0-based): those of verifications that accepted more than j."""
        at_least = self._accepted_exactly[::-1].cumsum()[::-1]
        return at_least[1:].tolist()
