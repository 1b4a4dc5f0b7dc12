"""Whole generations on one engine: blocking and as an async stream, with text at the end."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sonar_engine.detokenizer import IncrementalDetokenizer
from sonar_engine.errors import EngineDeadError, InvalidRequestError, QueueFullError
from sonar_engine.events import OutputCollector
from sonar_engine.types import Completion, RequestOutput, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from sonar_engine.engine import Engine

Sink = Callable[[RequestOutput | None], None]  # None: the engine has ended


class Generation:
    """Drives `engine.step` for callers in this process and routes outputs to them.

    Whoever waits steps: `generate` in the caller's thread, `stream` in one background thread. A step's outputs
    go to their own sinks whichever thread ran it. Lock order: `_stepping`, then `_table`; `submit` takes the
    table alone, so it never waits for a step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count(1)
        self._stepping = threading.Lock()
        self._table = threading.Condition()  # guards the collector, the sinks and the flags below
        self._collector = OutputCollector()
        self._sinks: dict[int, Sink] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: BaseException | None = None

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Completion]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts but {len(each)} sampling parameters", param="params")
        parts = [
            _Sequence(index, *self._engine.validate(self._encode(prompt), own), self._engine, on_text)
            for index, (prompt, own) in enumerate(zip(prompts, each, strict=True))
        ]
        try:
            waiting = deque(parts)
            while not all(part.done for part in parts):
                self._submit_from(waiting)
                self._step()
        finally:
            self._forget([part.request_id for part in parts if part.request_id and not part.done])
        return [part.completion() for part in parts]

    async def stream(self, prompt: str | Sequence[int], params: SamplingParams) -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[RequestOutput | None] = asyncio.Queue()

        def sink(output: RequestOutput | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, output)

        request_id = self._submit(self._encode(prompt), params, sink)
        self._ensure_thread()
        finished = False
        try:
            while not finished:
                output = await queue.get()
                if output is None:
                    raise EngineDeadError(f"the engine's loop ended: {self._failure or 'closed'}")
                finished = output.finish_reason is not None
                yield output
        finally:
            if not finished:
                self._forget([request_id])

    def close(self) -> None:
        with self._table:
            self._closed = True
            self._table.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        return self._engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _submit(self, prompt: Sequence[int] | np.ndarray, params: SamplingParams, sink: Sink) -> int:
        with self._table:
            if self._closed or self._failure is not None:
                raise EngineDeadError(f"the engine's loop ended: {self._failure or 'closed'}")
            request_id = next(self._ids)
            self._engine.submit(request_id, prompt, params)
            self._collector.add(request_id, params, time.monotonic())
            self._sinks[request_id] = sink
            self._table.notify_all()
        return request_id

    def _submit_from(self, waiting: deque[_Sequence]) -> None:
        """Submits in order until the engine's queue is full; the rest follows after later steps."""
        while waiting:
            part = waiting[0]
            try:
                part.request_id = self._submit(part.prompt, part.params, part.feed)
            except QueueFullError:
                return
            waiting.popleft()

    def _step(self) -> None:
        with self._stepping:
            events = self._engine.step()
            if events is None:
                return
            with self._table:
                outputs = self._collector.feed(events)
                sinks = [self._sinks[output.request_id] for output in outputs]
                for output in outputs:
                    if output.finish_reason is not None:
                        del self._sinks[output.request_id]
            for output, sink in zip(outputs, sinks, strict=True):
                sink(output)

    def _forget(self, request_ids: list[int]) -> None:
        """Abort requests nobody waits for any more, and see their end committed."""
        with self._table:
            for request_id in request_ids:
                if self._sinks.pop(request_id, None) is not None:
                    self._collector.discard(request_id)
                    self._engine.abort(request_id)
            nobody_steps = self._thread is None and not self._sinks
            self._table.notify_all()
        while nobody_steps and self._engine.has_work():
            self._step()

    def _ensure_thread(self) -> None:
        with self._table:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sonar-engine", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                with self._table:
                    self._table.wait_for(lambda: self._closed or self._engine.has_work())
                    if self._closed:
                        return
                self._step()
        except Exception as error:
            self._failure = error
        finally:
            with self._table:
                sinks, self._sinks = self._sinks, {}
            for sink in sinks.values():
                sink(None)


class _Sequence:
    """One prompt of `generate` on its way to a completion."""

    def __init__(
        self,
        index: int,
        prompt: np.ndarray,
        params: SamplingParams,
        engine: Engine,
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.request_id = 0  # 0: not submitted yet
        self.done = False  # the final event has come
        self._index = index
        self._engine = engine
        self._on_text = on_text
        self._detokenizer = IncrementalDetokenizer(engine.tokenizer, params)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._stop: str | None = None  # the stop string that ended it before the engine did
        self._last: RequestOutput | None = None

    def feed(self, output: RequestOutput | None) -> None:
        """Takes new tokens. A completed stop string ends the text there and aborts the rest in the engine."""
        self.done = output is None or output.finish_reason is not None
        self._last = output
        if output is None or self._stop is not None:
            return
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        delta = self._detokenizer.add(output.token_ids, output.finish_reason)
        self._token_ids += output.token_ids[: delta.num_tokens]
        if self._logprobs is not None:
            self._logprobs += (output.logprobs or [])[: delta.num_tokens]
        self._text.append(delta.text)
        self._stop = delta.stop
        if self._stop is not None and not self.done:
            self._engine.abort(self.request_id)
        if delta.text and self._on_text is not None:
            self._on_text(self._index, delta.text)

    def completion(self) -> Completion:
        """Raises EngineDeadError when the engine's loop ended first."""
        last = self._last
        if last is None or last.finish_reason is None or last.metrics is None:
            raise EngineDeadError("the engine's loop ended before the prompt was done")
        return Completion(
            index=self._index,
            text="".join(self._text),
            prompt_token_ids=self.prompt.tolist(),
            token_ids=self._token_ids,
            finish_reason="stop" if self._stop is not None else last.finish_reason,
            stop_reason=self._stop if self._stop is not None else last.stop_reason,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            metrics=last.metrics,
        )
