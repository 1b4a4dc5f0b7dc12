"""Many small pieces of work over one engine, each a few requests one after the other, with the batch kept full."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sonar_engine.engine import Engine
from sonar_engine.errors import TrainingError
from sonar_engine.events import OutputCollector
from sonar_engine.types import FinishReason, RequestMetrics, SamplingParams

Result = TypeVar("Result")


@dataclass(frozen=True)
class Request:
    """What a piece of work asks of the engine."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    """What it gets. `metrics` as for any finished request."""

    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason
    metrics: RequestMetrics


Task = Generator[Request, Answer, Result]
"""Yields requests, is sent their answers, returns its result."""


@dataclass
class _Running:
    index: int
    task: Task[Any]
    tokens: list[int] = field(default_factory=list)


class TaskRunner:
    """Runs tasks side by side on an engine that nothing else uses, and gives their results in the tasks' order.

    At most `window` tasks have begun whose results have not been given, so that one slow task holds up few others.
    """

    def __init__(self, engine: Engine, window: int) -> None:
        self._engine = engine
        self._window = min(window, engine.config.max_waiting)
        self._collector = OutputCollector()
        self._running: dict[int, _Running] = {}  # by request id
        self._results: dict[int, Any] = {}  # by index of the task
        self._next_id = 1

    def run(self, tasks: Iterator[Task[Result]]) -> Generator[Result, None, None]:
        """Closing the iterator aborts what runs. An error of a task ends all of them."""
        begun = given = 0
        exhausted = False
        try:
            while True:
                while not exhausted and begun - given < self._window:
                    task = next(tasks, None)
                    exhausted = task is None
                    if task is not None:
                        self._advance(begun, task, None)
                        begun += 1
                while given in self._results:
                    yield self._results.pop(given)
                    given += 1
                if exhausted and given == begun:
                    return
                if begun - given < self._window and not exhausted:
                    continue
                self._step()
        finally:
            self._abort()

    def _advance(self, index: int, task: Task[Any], answer: Answer | None) -> None:
        """The task's next request, or its result."""
        try:
            request = next(task) if answer is None else task.send(answer)
        except StopIteration as end:
            self._results[index] = end.value
            return
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._engine.submit(request_id, request.prompt, request.params)
        self._collector.add(request_id, request.params, time.monotonic())
        self._running[request_id] = _Running(index, task)

    def _step(self) -> None:
        events = self._engine.step()
        if events is None:
            return
        for output in self._collector.feed(events):
            running = self._running[output.request_id]
            running.tokens += output.token_ids
            if output.finish_reason is None or output.metrics is None:
                continue
            del self._running[output.request_id]
            if output.finish_reason not in ("stop", "length"):
                raise TrainingError(f"the engine ended a request with {output.finish_reason!r}; run this again")
            answer = Answer(output.request_id, running.tokens, output.finish_reason, output.metrics)
            self._advance(running.index, running.task, answer)

    def _abort(self) -> None:
        for request_id, running in self._running.items():
            running.task.close()
            self._collector.discard(request_id)
            self._engine.abort(request_id)
        self._running.clear()
        self._results.clear()
        while self._engine.has_work():
            self._engine.step()
