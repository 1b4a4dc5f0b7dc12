"""Requests that wait for their form of structured output to be compiled, off the engine's loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass

from sonar_engine.engine_messages import Submit
from sonar_engine.errors import InvalidRequestError, QueueFullError
from sonar_engine.types import StructuredOutput

MAX_PREPARING = 1024  # messages
COMPILE_SECONDS = 10.0  # a form that takes longer is refused


@dataclass(eq=False)
class _Waiting:
    submit: Submit
    done: Future[None]
    started_at: float | None = None  # time.monotonic() when its compilation began


class PreparedSubmits:
    """Submits with structured output, until their forms are compiled. All methods belong to the engine's loop.

    One form is compiled at a time, on one thread; it lets the loop go on but for moments.
    """

    def __init__(self, prepare: Callable[[StructuredOutput], None], compile_seconds: float = COMPILE_SECONDS) -> None:
        self._prepare = prepare
        self._compile_seconds = compile_seconds
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: list[_Waiting] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, submit: Submit) -> bool:
        """Keep a message that has something to prepare; False: it has nothing."""
        forms = list(dict.fromkeys(s.params.structured for s in submit.sequences if s.params.structured is not None))
        if not forms:
            return False
        waiting = _Waiting(submit, Future())
        self._waiting.append(waiting)
        if len(self._waiting) > MAX_PREPARING:
            waiting.done.set_exception(QueueFullError(f"{MAX_PREPARING} requests wait for their forms; try again soon"))
            return True
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="sonar-structured")
        self._pool.submit(self._run, waiting, forms)
        return True

    def _run(self, waiting: _Waiting, forms: list[StructuredOutput]) -> None:
        waiting.started_at = time.monotonic()
        try:
            for form in forms:
                if waiting.done.done():
                    return
                self._prepare(form)
        except Exception as error:
            _finish(waiting.done, error)
        else:
            _finish(waiting.done)

    def drop(self, request_ids: list[int]) -> None:
        """Give up messages that hold one of these."""
        gone = set(request_ids)
        for waiting in self._waiting:
            if any(sequence.request_id in gone for sequence in waiting.submit.sequences):
                _finish(waiting.done, InvalidRequestError("the request was aborted"))

    def take_done(self) -> Iterator[tuple[Submit, BaseException | None]]:
        """Messages that can be submitted, or must be refused with the error."""
        if not self._waiting:
            return
        limit = self._compile_seconds
        latest_start = time.monotonic() - limit
        for waiting in self._waiting:
            if waiting.started_at is not None and waiting.started_at < latest_start:
                error = InvalidRequestError(
                    f"the form takes longer than {limit:g} s to compile; simplify it", "structured"
                )
                _finish(waiting.done, error)
        done = [waiting for waiting in self._waiting if waiting.done.done()]
        self._waiting = [waiting for waiting in self._waiting if waiting not in done]
        for waiting in done:
            yield waiting.submit, waiting.done.exception()


def _finish(done: Future[None], error: Exception | None = None) -> None:
    """The first to finish it wins."""
    with contextlib.suppress(InvalidStateError):
        done.set_result(None) if error is None else done.set_exception(error)
