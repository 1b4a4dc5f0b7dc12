"""What a committed step tells the outside, as columns, and the per-request outputs made of it.

The engine's loop never touches a request in Python: `Scheduler.commit` fills the columns, they cross to the
front end as bytes, and `OutputCollector` turns them into `RequestOutput`s there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec
import numpy as np

from sonar_engine._scheduler import Events
from sonar_engine.types import (
    FinishReason,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    SpeculationMetrics,
    TokenLogprobs,
)

FINISH_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length", "abort", "error")
_ERROR = np.int32(FINISH_REASONS.index("error"))


class LogprobColumns(msgspec.Struct, frozen=True):
    """Log-probabilities of a step's tokens, in the order of `StepEvents.tokens`. N = tokens, M = widest request.

    Rows of requests that asked for none hold undefined values.
    """

    logprobs: bytes  # fp32 [N]
    ranks: bytes  # int32 [N]
    top_ids: bytes  # int32 [N, M]
    top_logprobs: bytes  # fp32 [N, M]
    width: int  # M


class PromptColumns(msgspec.Struct, frozen=True):
    """Log-probabilities of stretches of prompts, one a request. R = requests, N = positions of all of them."""

    request_ids: bytes  # int64 [R]
    firsts: bytes  # int32 [R], entry 0 is that of a prompt's second token
    lengths: bytes  # int32 [R]
    entries: LogprobColumns  # [N]


class StepEvents(msgspec.Struct, frozen=True):
    """Columns of one commit. E = events, N = tokens of all of them. At most one event a request and step."""

    now: float  # monotonic seconds at commit
    request_ids: bytes  # int64 [E]
    num_tokens: bytes  # int32 [E]
    finish: bytes  # int32 [E], index in FINISH_REASONS
    stop_tokens: bytes  # int32 [E], the user's stop token that ended it, -1 for none
    num_drafted: bytes  # int32 [E], draft tokens verified for it in this step
    num_accepted: bytes  # int32 [E], of these; they come first among the tokens, and may go beyond a stop
    num_cached: bytes  # int32 [E], prompt tokens found in the prefix cache at admission
    num_preemptions: bytes  # int32 [E], so far
    tokens: bytes  # int32 [N]
    admitted_ids: bytes = b""  # int64 [A], requests that entered a slot with this step
    admitted_at: float = 0.0  # monotonic seconds when the step was planned
    logprobs: LogprobColumns | None = None
    prompts: PromptColumns | None = None

    @classmethod
    def of(
        cls,
        events: Events,
        logprobs: LogprobColumns | None = None,
        prompts: PromptColumns | None = None,
        admitted: np.ndarray | None = None,
        admitted_at: float = 0.0,
        *,
        failed: np.ndarray | None = None,
    ) -> StepEvents:
        """The scheduler's columns, as of now. `failed` are ids of requests whose event is their last, an error."""
        finish = events.finish
        if failed is not None and failed.size:
            finish = np.where(np.isin(events.request_ids, failed), _ERROR, finish)
        return cls(
            now=time.monotonic(),
            request_ids=events.request_ids.tobytes(),
            num_tokens=events.num_tokens.tobytes(),
            finish=finish.tobytes(),
            stop_tokens=events.stop_tokens.tobytes(),
            num_drafted=events.num_drafted.tobytes(),
            num_accepted=events.num_accepted.tobytes(),
            num_cached=events.num_cached.tobytes(),
            num_preemptions=events.num_preemptions.tobytes(),
            tokens=events.tokens.tobytes(),
            admitted_ids=b"" if admitted is None else admitted.tobytes(),
            admitted_at=admitted_at,
            logprobs=logprobs,
            prompts=prompts,
        )

    @classmethod
    def none(cls) -> StepEvents:
        """Of a step in which no request got anything."""
        empty = b""
        return cls(time.monotonic(), empty, empty, empty, empty, empty, empty, empty, empty, empty)


@dataclass
class _Tracked:
    """What the front end knows of one running request."""

    params: SamplingParams
    submitted_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    histogram: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # until the first token

    def count_drafts(self, drafted: int, accepted: int) -> None:
        if drafted == 0:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1

    def metrics(self, now: float) -> RequestMetrics:
        first = self.first_token_at if self.first_token_at is not None else now
        return RequestMetrics(
            queue_time=(self.admitted_at if self.admitted_at is not None else now) - self.submitted_at,
            time_to_first_token=first - self.submitted_at,
            decode_time=max(self.last_token_at - first, 0.0),
            e2e_latency=now - self.submitted_at,
            num_cached_tokens=self.num_cached,
            num_preemptions=self.num_preemptions,
            speculation=SpeculationMetrics(
                num_spec_steps=self.num_spec_steps,
                num_draft_tokens=self.num_draft_tokens,
                num_accepted_draft_tokens=self.num_accepted,
                acceptance_histogram=list(self.histogram),
            ),
        )


class OutputCollector:
    """Turns `StepEvents` into `RequestOutput`s and keeps each request's metrics. Not thread-safe."""

    def __init__(self) -> None:
        self._tracked: dict[int, _Tracked] = {}

    def add(self, request_id: int, params: SamplingParams, submitted_at: float) -> None:
        self._tracked[request_id] = _Tracked(params, submitted_at)

    def discard(self, request_id: int) -> None:
        """Forget a request whose outputs nobody waits for any more; later events for it are dropped."""
        self._tracked.pop(request_id, None)

    def metrics(self, request_id: int) -> RequestMetrics | None:
        """What a request that still runs has cost until now; None when it is not tracked."""
        tracked = self._tracked.get(request_id)
        return None if tracked is None else tracked.metrics(time.monotonic())

    def __len__(self) -> int:
        return len(self._tracked)

    def request_ids(self) -> list[int]:
        return list(self._tracked)

    def feed(self, events: StepEvents) -> list[RequestOutput]:
        """Outputs of the tracked requests in `events`, in their order; a finished request is forgotten."""
        for request_id in np.frombuffer(events.admitted_ids, np.int64).tolist():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.admitted_at is None:
                tracked.admitted_at = events.admitted_at
        if events.prompts is not None:
            self._keep_prompts(events.prompts)
        request_ids = np.frombuffer(events.request_ids, np.int64).tolist()
        columns = [
            np.frombuffer(column, np.int32).tolist()
            for column in (
                events.num_tokens,
                events.finish,
                events.stop_tokens,
                events.num_drafted,
                events.num_accepted,
                events.num_cached,
                events.num_preemptions,
            )
        ]
        tokens = np.frombuffer(events.tokens, np.int32).tolist()
        outputs, start = [], 0
        for request_id, count, finish, stop, drafted, accepted, cached, preemptions in zip(
            request_ids, *columns, strict=True
        ):
            span = slice(start, start + count)
            start += count
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            tracked.count_drafts(drafted, accepted)
            tracked.num_cached, tracked.num_preemptions = cached, preemptions
            prompt_logprobs = None
            if count and tracked.first_token_at is None and tracked.params.prompt_logprobs is not None:
                prompt_logprobs, tracked.prompt_logprobs = tracked.prompt_logprobs, []
            if count:
                tracked.first_token_at = tracked.first_token_at or events.now
                tracked.last_token_at = events.now
            finished = finish != 0
            outputs.append(
                RequestOutput(
                    request_id=request_id,
                    token_ids=tokens[span],
                    num_accepted=accepted,
                    logprobs=_asked(events.logprobs, span, tracked.params.logprobs),
                    prompt_logprobs=prompt_logprobs,
                    finish_reason=FINISH_REASONS[finish],
                    stop_reason=stop if stop >= 0 else None,
                    metrics=tracked.metrics(events.now) if finished else None,
                )
            )
            if finished:
                del self._tracked[request_id]
        return outputs

    def _keep_prompts(self, prompts: PromptColumns) -> None:
        """A request that was preempted in its prompt has a stretch of it once more: the same again."""
        request_ids = np.frombuffer(prompts.request_ids, np.int64).tolist()
        firsts = np.frombuffer(prompts.firsts, np.int32).tolist()
        lengths = np.frombuffer(prompts.lengths, np.int32).tolist()
        start = 0
        for request_id, first, length in zip(request_ids, firsts, lengths, strict=True):
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.first_token_at is None and tracked.params.prompt_logprobs is not None:
                span = slice(start, start + length)
                entries = _entries(prompts.entries, span, tracked.params.prompt_logprobs)
                tracked.prompt_logprobs[first : first + length] = entries
            start += length


def _asked(columns: LogprobColumns | None, span: slice, num_top: int | None) -> list[TokenLogprobs] | None:
    if num_top is None:
        return None
    return [] if columns is None or span.start == span.stop else _entries(columns, span, num_top)


def _entries(columns: LogprobColumns, span: slice, num_top: int) -> list[TokenLogprobs]:
    """The rows `span` with `num_top` top entries each."""
    every = np.frombuffer(columns.logprobs, np.float32)
    shape = (len(every), columns.width)
    top_ids = np.frombuffer(columns.top_ids, np.int32).reshape(shape)[span, :num_top]
    top = np.frombuffer(columns.top_logprobs, np.float32).reshape(shape)[span, :num_top]
    chosen = every[span].tolist()
    ranks = np.frombuffer(columns.ranks, np.int32)[span].tolist()
    return [
        TokenLogprobs(logprob, rank, ids, values)
        for logprob, rank, ids, values in zip(chosen, ranks, top_ids.tolist(), top.tolist(), strict=True)
    ]
