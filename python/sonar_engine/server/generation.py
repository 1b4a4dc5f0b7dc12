"""A response under way: its sequences in the engine, their outputs as deltas, its end under every circumstance."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from sonar_engine.errors import EngineDeadError
from sonar_engine.output_stream import OutputStream
from sonar_engine.response_metrics import response_metrics
from sonar_engine.server.choice import Choice, ChoiceDelta
from sonar_engine.server.errors import RequestTimeoutError
from sonar_engine.server.state import ServerState
from sonar_engine.types import RequestMetrics, SpeculationMetrics

Deltas = list[tuple[Choice, ChoiceDelta]]


class Generation:
    """The choices of one response. `open` it, read `deltas` to the end, and `close` it in every case."""

    def __init__(self, state: ServerState, response_id: str, choices: list[Choice], num_prompt_tokens: int) -> None:
        self.response_id = response_id
        self.choices = choices
        self.num_prompt_tokens = num_prompt_tokens
        self._state = state
        self.first_token_at: float | None = None  # as the API saw it
        self._started_at = time.monotonic()
        self._stream: OutputStream | None = None
        self._by_request: dict[int, Choice] = {}
        self._spoke_at: dict[int, float] = {}  # request id -> when it last said something
        self._queued: dict[int, int] = {}  # request id -> prompt tokens, until the first token

    async def open(self) -> None:
        """Submit all choices. Raises InvalidRequestError, QueueFullError or EngineDeadError."""
        state = self._state
        state.check_queue(sum(len(choice.prompt) for choice in self.choices))
        self._stream = await state.client.open([(choice.prompt, choice.params) for choice in self.choices])
        for choice, request_id in zip(self.choices, self._stream.request_ids, strict=True):
            choice.request_id = request_id
            self._by_request[request_id] = choice
            self._queued[request_id] = len(choice.prompt)
        state.num_queued_tokens += sum(self._queued.values())
        state.responses[self.response_id] = self._stream

    def close(self) -> None:
        """Abort what still runs and forget the response."""
        self._state.responses.pop(self.response_id, None)
        self._state.num_queued_tokens -= sum(self._queued.values())
        self._queued.clear()
        for choice in self._by_request.values():
            choice.metrics = choice.metrics or self._state.client.metrics(choice.request_id)
        if self._stream is not None:
            self._stream.close()

    async def deltas(self, patience: float | None = None) -> AsyncIterator[Deltas]:
        """All news at each wake-up; empty after `patience` seconds of silence.

        Raises EngineDeadError, or RequestTimeoutError when the server's limit is over.
        """
        stream = self._opened()
        while not stream.finished:
            outputs = await stream.wait(self._next_timeout(patience))
            self._check_deadline()
            now = time.monotonic()
            news: Deltas = []
            for output in outputs:
                choice = self._by_request[output.request_id]
                if output.finish_reason == "error":
                    raise EngineDeadError("the engine failed on this request; its log says why")
                delta = choice.feed(output)
                if delta is None:
                    continue
                self._observe(choice, delta, now)
                news.append((choice, delta))
                if delta.last:
                    self._end(choice, stream)
            yield news

    def _opened(self) -> OutputStream:
        if self._stream is None:
            raise EngineDeadError("the response was never submitted")
        return self._stream

    def _next_timeout(self, patience: float | None) -> float | None:
        limit = self._state.config.request_timeout
        if limit is None:
            return patience
        left = max(self._started_at + limit - time.monotonic(), 0.0)
        return left if patience is None else min(left, patience)

    def _check_deadline(self) -> None:
        limit = self._state.config.request_timeout
        if limit is not None and time.monotonic() - self._started_at >= limit:
            raise RequestTimeoutError(f"the request took longer than the server's limit of {limit:g} seconds")

    def _observe(self, choice: Choice, delta: ChoiceDelta, now: float) -> None:
        if not delta.token_ids:
            return
        last = self._spoke_at.get(choice.request_id)
        if last is None:
            self._state.num_queued_tokens -= self._queued.pop(choice.request_id, 0)
            self.first_token_at = self.first_token_at or now
            self._state.metrics.time_to_first_token.observe(now - self._started_at)
        else:
            self._state.metrics.inter_token_latency.observe(now - last)
        self._spoke_at[choice.request_id] = now

    def _end(self, choice: Choice, stream: OutputStream) -> None:
        """Books a choice that has ended; one ended by a stop string still runs in the engine until now."""
        if choice.metrics is None:
            choice.metrics = self._state.client.metrics(choice.request_id)
            stream.give_up(choice.request_id)
        self._state.metrics.observe_end(choice)

    # What the response says of itself

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def finish_reasons(self) -> list[str]:
        """Of every choice; "abort" for one that had not ended when the response was closed."""
        return [choice.finish_reason or "abort" for choice in self.choices]

    def usage(self) -> dict[str, Any]:
        completion = self.num_output_tokens
        cached: dict[int, int] = {}  # by prompt: its choices share it
        for choice in self.choices:
            if choice.metrics is not None:
                cached[id(choice.prompt)] = max(cached.get(id(choice.prompt), 0), choice.metrics.num_cached_tokens)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }

    def metrics(self) -> dict[str, Any] | None:
        """The `metrics` object over all choices."""
        total = self.total_metrics()
        return None if total is None else response_metrics(total, self.num_output_tokens)

    def total_metrics(self) -> RequestMetrics | None:
        """Of all choices together; None while nothing is known of any."""
        parts = [choice.metrics for choice in self.choices if choice.metrics is not None]
        return _sum(parts) if parts else None


def _sum(parts: list[RequestMetrics]) -> RequestMetrics:
    """Counts add up; times are those of the first to start and the last to end."""
    if len(parts) == 1:
        return parts[0]
    histogram = [0] * max(len(part.speculation.acceptance_histogram) for part in parts)
    for part in parts:
        for accepted, steps in enumerate(part.speculation.acceptance_histogram):
            histogram[accepted] += steps
    return RequestMetrics(
        queue_time=min(part.queue_time for part in parts),
        time_to_first_token=min(part.time_to_first_token for part in parts),
        decode_time=max(part.decode_time for part in parts),
        e2e_latency=max(part.e2e_latency for part in parts),
        num_cached_tokens=sum(part.num_cached_tokens for part in parts),
        num_preemptions=sum(part.num_preemptions for part in parts),
        speculation=SpeculationMetrics(
            num_spec_steps=sum(part.speculation.num_spec_steps for part in parts),
            num_draft_tokens=sum(part.speculation.num_draft_tokens for part in parts),
            num_accepted_draft_tokens=sum(part.speculation.num_accepted_draft_tokens for part in parts),
            acceptance_histogram=histogram,
        ),
    )
