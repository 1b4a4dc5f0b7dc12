"""What ran when: intervals of the host, the planner's thread and the device, on one clock.

`copies` are those to the host; `waits` are when the host had nothing to do, inside its own intervals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Lane = Literal["host", "planner", "device", "copies", "waits"]


@dataclass(frozen=True)
class Interval:
    """Seconds on the timeline's clock, half-open."""

    lane: Lane
    name: str
    start: float
    end: float
    step: int  # the engine's steps, counted from 0 in the order in which they are planned
    slot: int  # the packed slot of that step: read on the host and the device, written by the planner

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def overlaps(self, other: Interval) -> bool:
        return self.start < other.end and other.start < self.end


@dataclass
class Timeline:
    """Intervals in the order in which they were queued, or ended on the host."""

    intervals: list[Interval] = field(default_factory=list)

    def add(self, interval: Interval) -> None:
        self.intervals.append(interval)

    def of(self, lane: Lane, name: str | None = None) -> list[Interval]:
        """The intervals of a lane, of one name if it is given."""
        return [each for each in self.intervals if each.lane == lane and name in (None, each.name)]

    def between(self, first: int, end: int) -> Timeline:
        """What belongs to the steps `first`..`end`, half-open."""
        return Timeline([each for each in self.intervals if first <= each.step < end])

    def idle_gaps(self) -> Iterator[tuple[float, float]]:
        """(start, end) of each time between two kernels in which the device has nothing to run."""
        kernels = self.of("device")
        for before, after in pairwise(kernels):
            if after.start > before.end:
                yield before.end, after.start

    def device_idle_share(self) -> float:
        """Share of the time from the first kernel's start to the last one's end; 0 without kernels."""
        kernels = self.of("device")
        if not kernels:
            return 0.0
        return sum(end - start for start, end in self.idle_gaps()) / (kernels[-1].end - kernels[0].start)
