"""What steps cost by decode rows and draft length, measured once when the engine starts.

Whole steps are run, of requests that exist for this only, so whatever a drafter, a device or the host adds is in their
time. Other work on the machine only ever adds to it, so of several rounds over all lengths each length keeps its least.
It is a first guess over short contexts: the policy of draft lengths corrects it by the steps that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from sonar_engine.config import EngineConfig
from sonar_engine.drafters.base import Draft, Drafter, Verdict
from sonar_engine.schedules.orders import Schedule
from sonar_engine.schedules.planner import StepPlanner
from sonar_engine.schedules.stages import Machine, commit, plan
from sonar_engine.step_buffers import BatchMetadata
from sonar_engine.step_statistics import StepStatistics

BUDGET_SECONDS = 4.0
NUMS_ROWS = (1, 8, 64, 256)
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MOST_STEPS_TO_START = 4  # until all requests decode: one prefills them, unless there are too few pages
QUICK_SECONDS = 0.02  # of a step below it the first run does not count, and two more do
MOST_ROUNDS = 10

CostPoint = tuple[int, int, float]
"""Decode rows, drafts of each, seconds of the step."""


@dataclass(frozen=True)
class CostRequests:
    """Requests to measure with."""

    submit: Callable[[int], int]  # (max_tokens) -> the id of a new one with a prompt of one token
    drop: Callable[[int], None]  # ends one
    config: EngineConfig
    max_model_len: int

    @property
    def most_rows(self) -> int:
        """That one step prefills."""
        return min(self.config.max_num_seqs, self.config.max_num_batched_tokens, self.config.max_waiting)


class _Constant:
    """Stands in for a drafter that finds its drafts without the device: proposes token 0."""

    needs_hidden: Literal["none"] = "none"
    runs_on: Literal["leader"] = "leader"
    kv_layers = 0

    def __init__(self, max_num_seqs: int, num_drafts: int) -> None:
        self._lens = np.full(max_num_seqs, num_drafts, np.int32)

    def draft_lens(self) -> np.ndarray | None:
        return self._lens

    def propose(self, batch: BatchMetadata) -> Draft | None:
        if batch.num_drafts == 0:
            return None
        return Draft(batch.token_ids.new_zeros((batch.num_decode_reqs, batch.max_draft_tokens)))

    def ingest(self, batch: BatchMetadata, hidden: torch.Tensor, verdict: Verdict) -> None:
        pass

    def admit(self, slot: int, request_id: int, speculate: int) -> None:
        pass


class _Limited:
    """A drafter that is asked for `limit` drafts a row."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.limit = 0
        self.needs_hidden = drafter.needs_hidden
        self.runs_on = drafter.runs_on
        self.kv_layers = drafter.kv_layers
        self.propose = drafter.propose
        self.ingest = drafter.ingest
        self.admit = drafter.admit

    def draft_lens(self) -> np.ndarray | None:
        lens = self._drafter.draft_lens()
        return None if lens is None or self.limit == 0 else np.minimum(lens, np.int32(self.limit))


def measure_step_costs(
    machine: Machine, schedule: Schedule, requests: CostRequests, most: int, *, looks_up: bool
) -> list[CostPoint]:
    """Steps of few and of many rows without drafts and with up to `most`, as many as fit into `BUDGET_SECONDS`.

    At each number of rows there are two lengths or more; none at all where sequences have no room for drafts.
    `looks_up`: the drafter's own work is no part of a step's time, whether or not it finds drafts.
    """
    drafter: Drafter = _Constant(requests.config.max_num_seqs, most) if looks_up else machine.drafter
    meter = _Meter(machine, schedule, requests, _Limited(drafter), most, may_count_first=looks_up)
    points: list[CostPoint] = []
    nums_rows = sorted({min(num_rows, requests.most_rows) for num_rows in NUMS_ROWS})
    for num_rows in nums_rows:
        if points and meter.estimate(points, num_rows) > meter.seconds_left:
            break
        meter.seconds_kept = 0.0 if num_rows == nums_rows[-1] else 0.5 * meter.seconds_left  # for more rows
        curve = meter.curve(num_rows, [length for length in LENGTHS if length < most] + [most])
        if len(curve) < 2:
            break
        points += [(num_rows, length, seconds) for length, seconds in curve.items()]
    return points


class _Meter:
    def __init__(
        self,
        machine: Machine,
        schedule: Schedule,
        requests: CostRequests,
        drafter: _Limited,
        most: int,
        *,
        may_count_first: bool,
    ) -> None:
        self._statistics = StepStatistics(most)
        planner = StepPlanner(machine.scheduler, machine.buffers, drafter, ahead=False)
        self._machine = replace(machine, drafter=drafter, planner=planner, statistics=self._statistics)
        self._schedule = schedule
        self._requests = requests
        self._drafter = drafter
        # Nothing of the step before runs into it.
        self._may_count_first = may_count_first and not machine.device.runs_alone
        self.seconds_left = BUDGET_SECONDS
        self.seconds_kept = 0.0  # of these, from further lengths

    def estimate(self, points: Sequence[CostPoint], num_rows: int) -> float:
        """Seconds of the least that `curve` runs, a prefill and two lengths, by the tokens of the last curve."""
        (rows, _, first), (_, length, last) = next(p for p in points if p[0] == points[-1][0]), points[-1]
        a_token = max(last - first, 0.0) / (rows * length)
        num_steps = 2 if self._may_count_first else 4
        return (1 + num_steps) * first + a_token * (num_rows * (1 + num_steps * 1.5))

    def curve(self, num_rows: int, lengths: Sequence[int]) -> dict[int, float]:
        """Seconds by length of steps of so many rows, in rounds over all lengths: one round, two lengths at least."""
        most_steps = 3 * MOST_ROUNDS * len(lengths)
        max_tokens = min(most_steps * (lengths[-1] + 1) + 2, self._requests.max_model_len - 1)
        ids = [self._requests.submit(max_tokens) for _ in range(num_rows)]
        self._statistics.rest()
        least: dict[int, float] = {}
        try:
            self._drafter.limit = 0
            if any(self._step(num_rows, 0) for _ in range(MOST_STEPS_TO_START)):
                for length in (length for _ in range(MOST_ROUNDS) for length in lengths):
                    seconds = self._time(num_rows, length) if self._has_time(len(least), num_rows, length) else None
                    if seconds is None:
                        break
                    least[length] = min(seconds, least.get(length, seconds))
        finally:
            for request_id in ids:
                self._requests.drop(request_id)
            self._machine.scheduler.poll()
            self._machine.device.rest()
        return least

    def _has_time(self, num_known: int, num_rows: int, length: int) -> bool:
        """Whether a further step of so many tokens may be run, with `num_known` lengths measured."""
        is_late = num_known >= 2 and self.seconds_left <= self.seconds_kept
        return not is_late and num_rows * (length + 1) <= self._requests.config.max_num_batched_tokens

    def _time(self, num_rows: int, length: int) -> float | None:
        """Seconds of a step; None: it cannot have so many rows and drafts."""
        self._drafter.limit = length
        first = self._step(num_rows, length)
        if first is None or (self._may_count_first and first > QUICK_SECONDS):
            return first
        second = self._step(num_rows, length)
        if second is None or second > QUICK_SECONDS:
            return second
        third = self._step(num_rows, length)
        return second if third is None else min(second, third)

    def _step(self, num_rows: int, length: int) -> float | None:
        """Runs a step. Its seconds, from the end of the one before, if it was one of these rows and drafts."""
        step_id = plan(self._machine)
        if step_id is None:
            return None
        step = self._schedule(self._machine, step_id)
        batch = step.batch
        is_asked = batch.num_decode_reqs == batch.num_reqs == num_rows and batch.num_drafts == num_rows * length
        commit(self._machine, step)
        seconds = self._statistics.last_step_seconds
        self.seconds_left -= seconds or 0.0
        return seconds if is_asked else None
