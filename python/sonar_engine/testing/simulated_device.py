"""A device that computes nothing: kernels of given durations, in a queue, beside the engine's own loop.

The host queues a kernel and goes on; the kernel starts when the ones before it have ended. What a copy to the host
brings is there once the kernels queued before the copy are done. The loop, the scheduler, the planner's thread and the
stages are the engine's own, so what is seen of them here is how they overlap with a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from sonar_engine.device import HostCopy
from sonar_engine.testing.simulated_clock import Clock, RealClock
from sonar_engine.testing.timeline import Interval, Lane, Timeline


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of one pass each: of the target in `verify`, of the drafter in `propose` and in `ingest`."""

    verify: float
    propose: float
    ingest: float

    def of(self, stage: str) -> float:
        """A pass is named after the stage that queues it."""
        return {"verify": self.verify, "propose": self.propose, "ingest": self.ingest}[stage]


class SimulatedDevice:
    """A `Device` that runs alone. Its timeline has what the host, the planner and the device did."""

    runs_alone = True

    def __init__(self, times: KernelTimes, clock: Clock | None = None) -> None:
        """`clock`: real time when None."""
        self.timeline = Timeline()
        self.clock: Clock = RealClock() if clock is None else clock
        self.idle_seconds = 0.0
        self._times = times
        self._free_at = 0.0  # when all that has been queued is done
        self._stage = ""
        self.step, self._slot = -1, 0  # of the host
        self._ended_at: float | None = None  # of the last step

    def enter_step(self, slot: int) -> None:
        """What follows belongs to the next step, whose batch is in packed slot `slot`."""
        self.step, self._slot = self.step + 1, slot

    def queue_pass(self) -> None:
        """Queues one pass of a model; the stage that the host is in says which."""
        start = max(self.clock.now(), self._free_at)
        self._free_at = start + self._times.of(self._stage)
        self.add("device", self._stage, start, self._free_at)

    def copy_to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        now = self.clock.now()
        self.add("copies", "to host", now, max(now, self._free_at))
        return _Arriving([tensor.numpy() for tensor in tensors], self, self._free_at)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._stage, start = name, self.clock.now()
        self.clock.work()
        try:
            yield
        finally:
            self._stage = ""
            self.add("host", name, start, self.clock.now())  # of the step in which the stage ends

    def begin_step(self) -> None:
        if self._ended_at is not None:
            self.idle_seconds += max(self.clock.now() - self._ended_at, 0.0)

    def end_step(self) -> None:
        self._ended_at = self._free_at

    def rest(self) -> None:
        self._ended_at = None

    def wait_until(self, what: str, moment: float) -> None:
        """The host has nothing to do until then."""
        start = self.clock.now()
        if moment > start:
            self.clock.wait_until(moment)
            self.add("waits", what, start, self.clock.now())

    def add(self, lane: Lane, name: str, start: float, end: float) -> None:
        """An interval of the step that the host is at."""
        self.timeline.add(Interval(lane, name, start, end, self.step, self._slot))


class _Arriving:
    def __init__(self, arrays: list[np.ndarray], device: SimulatedDevice, moment: float) -> None:
        self._arrays = arrays
        self._device = device
        self._moment = moment

    def wait(self) -> list[np.ndarray]:
        self._device.wait_until("verdict", self._moment)
        return self._arrays
