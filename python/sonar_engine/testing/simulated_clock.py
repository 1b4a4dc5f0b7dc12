"""Time of a simulated device: real, so that the host's own work counts, or virtual, so that every run is the same."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from any origin."""

    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None:
        """The host does nothing until then."""
        ...

    def work(self) -> None:
        """The host does the work of one stage."""
        ...


SPIN_SECONDS = 1e-3  # before the moment that is waited for: a sleep ends late


class RealClock:
    """The host's work takes what it takes. Waiting sleeps, then spins, each without the interpreter's lock."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        while (left := moment - time.perf_counter()) > 0:
            time.sleep(max(left - SPIN_SECONDS, 0))

    def work(self) -> None:
        pass


class VirtualClock:
    """Each stage of the host takes `stage_seconds`, and nothing else takes time: no run depends on the machine."""

    def __init__(self, stage_seconds: float) -> None:
        self._stage_seconds = stage_seconds
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)

    def work(self) -> None:
        self._now += self._stage_seconds
