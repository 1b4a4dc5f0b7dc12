"""Outputs of a few sequences on their way to one reader: a mailbox with one wake-up a step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from sonar_engine.errors import SonarError
from sonar_engine.types import RequestOutput


class OutputStream:
    """What the sequences `request_ids` have said since the reader last looked.

    Nothing here blocks the sender; what waits is bounded by the sequences' `max_tokens`.
    """

    def __init__(self, request_ids: tuple[int, ...], abort: Callable[[list[int]], None]) -> None:
        self.request_ids = request_ids
        self._abort = abort
        self._open = set(request_ids)
        self._outputs: list[RequestOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = math.inf  # in the loop's time
        self._error: SonarError | None = None

    @property
    def finished(self) -> bool:
        """Every sequence has ended and its last output was read. Never so after a failure: `wait` raises that."""
        return not self._open and not self._outputs and self._error is None

    async def wait(self, timeout: float | None = None) -> list[RequestOutput]:
        """Everything new, at least one output; empty after `timeout` seconds or when the stream has finished.

        Raises the engine's death once what it said before has been read.
        """
        if not self._outputs:
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            await self._sleep(timeout)
            if not self._outputs and self._error is not None:
                raise self._error
        outputs, self._outputs = self._outputs, []
        return outputs

    async def _sleep(self, timeout: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        self._wake_at = math.inf if timeout is None else loop.time() + timeout
        if timeout is not None and (self._timer is None or self._timer.when() > self._wake_at):
            self._arm(loop)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer serves many waits: a wait that ends early leaves it, and it moves on when it fires too soon."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self._wake_at, self._on_timer, loop)

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None or self._wake_at == math.inf:
            return
        if loop.time() >= self._wake_at:
            self._wake()
        else:
            self._arm(loop)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def deliver(self, output: RequestOutput) -> None:
        """New tokens; later ones of a sequence that was given up are dropped."""
        if output.request_id not in self._open:
            return
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        self._outputs.append(output)
        self._wake()

    def fail(self, error: SonarError) -> None:
        """Nothing more will come."""
        if self._open:
            self._error = error
            self._open.clear()
        self._wake()

    def cancel(self, error: SonarError) -> None:
        """End all that still runs; the reader gets `error` after what it has not read yet."""
        still_open = sorted(self._open)
        self.fail(error)
        if still_open:
            self._abort(still_open)

    def give_up(self, request_id: int) -> None:
        """End one sequence early: the engine forgets it, and nothing more of it arrives."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._abort([request_id])
        self._outputs = [output for output in self._outputs if output.request_id != request_id]

    def close(self) -> None:
        """End all that still runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._open:
            still_open = sorted(self._open)
            self._open.clear()
            self._abort(still_open)
