"""The order of a run: which rows each optimiser step sees, and its learning rate. A function of the settings alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sonar_engine.training.config import FitConfig
from sonar_engine.training.packing import Row, batches_of, epoch_rows


@dataclass(frozen=True)
class PlannedStep:
    """Steps count from 1; `rows` is the batch of all ranks."""

    step: int
    epoch: int
    rows: list[Row]


class FitSchedule:
    """`lengths[i]` of text i; `indices` are the texts to train on."""

    def __init__(self, config: FitConfig, lengths: Sequence[int], indices: Sequence[int]) -> None:
        self._config = config
        self._lengths = lengths
        self._indices = indices
        planned = sum(len(list(self._batches(epoch))) for epoch in range(config.epochs))
        self.num_steps = planned if config.max_steps is None else min(planned, config.max_steps)

    def steps(self, done: int) -> Iterator[PlannedStep]:
        """What comes after `done` steps."""
        step = 0
        for epoch in range(self._config.epochs):
            for rows in self._batches(epoch):
                step += 1
                if step > self.num_steps:
                    return
                if step > done:
                    yield PlannedStep(step, epoch, rows)

    def rate(self, step: int) -> float:
        """Linear to the highest, then a cosine down to its `final_rate`."""
        config = self._config
        if step <= config.warmup_steps:
            return config.learning_rate * step / config.warmup_steps
        progress = (step - config.warmup_steps) / max(1, self.num_steps - config.warmup_steps)
        share = config.final_rate + (1 - config.final_rate) * 0.5 * (1 + math.cos(math.pi * min(progress, 1)))
        return config.learning_rate * share

    def _batches(self, epoch: int) -> Iterator[list[Row]]:
        config = self._config
        rows = epoch_rows(self._lengths, self._indices, config.row_tokens, config.seed, epoch)
        return batches_of(rows, config.batch_rows)
