"""An engine without a model: deterministic tokens, adjustable speed, and the ways in which a real one can fail.

Options travel in `EngineConfig.model` as `fake:{JSON}`, so that the engine's process can build it like a real one.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import numpy as np

from sonar_engine.config import EngineConfig
from sonar_engine.errors import InvalidRequestError, QueueFullError
from sonar_engine.events import FINISH_REASONS, LogprobColumns, PromptColumns, StepEvents
from sonar_engine.types import EngineInfo, EngineStats, FinishReason, SamplingParams, StructuredOutput

FACTORY = "sonar_engine.testing.fake_engine:build_fake_engine"


class FakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`echo` replays the prompt and ends with EOS; otherwise letters follow from the prompt, seed and position."""

    echo: bool = False
    tokens_per_step: int = 1  # the last is the target's own, those before it count as accepted drafts
    drafts_per_step: int | None = None  # None: all drafts were accepted
    step_seconds: float = 0.0
    prefill_steps: int = 1
    prepare_seconds: float = 0.0  # of a form of structured output, which is not followed
    load_seconds: float = 0.0
    load_error: str | None = None
    hang_after_steps: int | None = None
    die_after_steps: int | None = None
    fail_after_steps: int | None = None
    vocab_size: int = 264
    first_letter: int = 64  # id of "a" in the tokenizer of bytes
    eos_token_id: int = 262
    max_model_len: int = 2048
    num_pages: int = 4096

    def config(self, **fields: object) -> EngineConfig:
        """A configuration whose engine is this one."""
        return EngineConfig.model_validate({"model": "fake:" + msgspec.json.encode(self).decode(), **fields})


@dataclass
class _Request:
    request_id: int
    prompt: list[int]
    params: SamplingParams
    key: bytes
    max_tokens: int
    prefill_left: int
    output: list[int] = field(default_factory=list)
    aborted: bool = False


@dataclass
class _Event:
    request_id: int
    tokens: list[int]
    finish: FinishReason | None
    stop_token: int = -1
    drafted: int = 0
    accepted: int = 0


class FakeEngine:
    """The interface of `Engine`, one thread."""

    def __init__(self, config: EngineConfig, options: FakeOptions) -> None:
        self._options = options
        self._config = config
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._gone: list[_Request] = []  # aborted before they ran
        self._counters = dict.fromkeys(("steps", "prompt", "generated", "drafts", "drafted", "accepted"), 0)
        self._accepted_per_pos = [0] * max(options.tokens_per_step - 1, 0)
        self.info = EngineInfo(
            model_name="fake",
            max_model_len=min(config.max_model_len or options.max_model_len, options.max_model_len),
            vocab_size=options.vocab_size,
            eos_token_ids=[options.eos_token_id],
            dtype="float32",
            device="cpu",
            num_pages=options.num_pages,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            drafter="none" if options.tokens_per_step == 1 else "fake",
            num_speculative_tokens=options.tokens_per_step - 1,
            version="0",
        )

    def submit(self, request_id: int, prompt: np.ndarray, params: SamplingParams) -> None:
        tokens = prompt.tolist()
        room = self.info.max_model_len - len(tokens)
        if not tokens or room < 1:
            raise InvalidRequestError("the prompt is empty or too long", param="prompt")
        if len(self._waiting) >= self._config.max_waiting:
            raise QueueFullError(f"{len(self._waiting)} requests are waiting already; try again later")
        max_tokens = min(params.max_tokens if params.max_tokens is not None else room, room)
        key = f"{tokens}{params.seed if params.temperature > 0 else None}".encode()
        self._waiting.append(_Request(request_id, tokens, params, key, max_tokens, self._options.prefill_steps))

    def prepare(self, form: StructuredOutput) -> None:
        time.sleep(self._options.prepare_seconds)
        if form.content == "wrong":
            raise InvalidRequestError("the form is wrong", param="structured")

    def abort(self, request_id: int) -> None:
        for request in [*self._waiting, *self._running]:
            request.aborted |= request.request_id == request_id
        self._gone += [request for request in self._waiting if request.aborted]
        self._waiting = deque(request for request in self._waiting if not request.aborted)

    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._gone)

    def step(self) -> StepEvents | None:
        if not self.has_work():
            return None
        self._fail_as_told()
        planned_at = time.monotonic()
        admitted = []
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            request = self._waiting.popleft()
            self._running.append(request)
            self._counters["prompt"] += len(request.prompt)
            admitted.append(request.request_id)
        time.sleep(self._options.step_seconds)
        self._counters["steps"] += 1
        events = [_Event(request.request_id, [], "abort") for request in self._gone]
        self._gone.clear()
        requests = {request.request_id: request for request in self._running}
        events += [event for request in self._running if (event := self._advance(request)) is not None]
        ended = {event.request_id for event in events if event.finish is not None}
        self._running = [request for request in self._running if request.request_id not in ended]
        return _columns(events, requests, admitted, planned_at, self.info.vocab_size)

    def _fail_as_told(self) -> None:
        steps = self._counters["steps"]
        if steps == self._options.hang_after_steps:
            time.sleep(3600)
        if steps == self._options.die_after_steps:
            os._exit(3)
        if steps == self._options.fail_after_steps:
            raise RuntimeError("the fake engine fails as told")

    def _advance(self, request: _Request) -> _Event | None:
        if request.aborted:
            return _Event(request.request_id, [], "abort")
        if request.prefill_left > 1:
            request.prefill_left -= 1
            return None
        width = self._options.tokens_per_step if request.params.speculative_enabled and request.output else 1
        event = _Event(request.request_id, [], None)
        while len(event.tokens) < width and event.finish is None:
            token = self._token(request, len(request.output))
            request.output.append(token)
            event.tokens.append(token)
            self._end(request, event, token)
        self._count(event, width - 1)
        return event

    def _end(self, request: _Request, event: _Event, token: int) -> None:
        """Stop rules at the newest token."""
        params, count = request.params, len(request.output)
        if count >= params.min_tokens and token in params.stop_token_ids:
            event.finish, event.stop_token = "stop", token
        elif count >= params.min_tokens and not params.ignore_eos and token == self._options.eos_token_id:
            event.finish = "stop"
        elif count >= request.max_tokens:
            event.finish = "length"

    def _token(self, request: _Request, position: int) -> int:
        if self._options.echo:
            return request.prompt[position] if position < len(request.prompt) else self._options.eos_token_id
        digest = hashlib.blake2b(request.key + position.to_bytes(4, "little"), digest_size=4).digest()
        return self._options.first_letter + int.from_bytes(digest, "little") % 26

    def _count(self, event: _Event, width: int) -> None:
        counters = self._counters
        counters["generated"] += len(event.tokens)
        if width == 0:
            return
        event.accepted = len(event.tokens) - 1
        event.drafted = max(self._options.drafts_per_step or width, event.accepted)
        counters["drafts"] += 1
        counters["drafted"] += event.drafted
        counters["accepted"] += event.accepted
        for position in range(event.accepted):
            self._accepted_per_pos[position] += 1

    def stats(self) -> EngineStats:
        page, counters = self.info.page_size, self._counters
        used = sum(-(-(len(request.prompt) + len(request.output)) // page) for request in self._running)
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pages=self.info.num_pages,
            num_free_pages=self.info.num_pages - used,
            num_cached_pages=0,
            kv_cache_usage=used / self.info.num_pages,
            prefix_queries=counters["prompt"],
            prefix_hits=0,
            num_preemptions=0,
            num_steps=counters["steps"],
            prompt_tokens=counters["prompt"],
            generation_tokens=counters["generated"],
            num_drafts=counters["drafts"],
            num_draft_tokens=counters["drafted"],
            num_accepted_tokens=counters["accepted"],
            accepted_per_pos=list(self._accepted_per_pos),
            step_seconds={"plan": 0.0, "verify": counters["steps"] * self._options.step_seconds},
            device_idle_seconds=0.0,
        )

    def reset_prefix_cache(self) -> bool:
        return not self._running

    def probe(self) -> None:
        self._fail_as_told()
        self._counters["steps"] += 1

    def close(self) -> None:
        self._running.clear()
        self._waiting.clear()


def _columns(
    events: list[_Event], requests: dict[int, _Request], admitted: list[int], planned_at: float, vocab_size: int
) -> StepEvents:
    def column(values: list[int], dtype: type[np.generic] = np.int32) -> bytes:
        return np.array(values, dtype).tobytes()

    return StepEvents(
        now=time.monotonic(),
        request_ids=column([event.request_id for event in events], np.int64),
        num_tokens=column([len(event.tokens) for event in events]),
        finish=column([FINISH_REASONS.index(event.finish) for event in events]),
        stop_tokens=column([event.stop_token for event in events]),
        num_drafted=column([event.drafted for event in events]),
        num_accepted=column([event.accepted for event in events]),
        num_cached=column([0] * len(events)),
        num_preemptions=column([0] * len(events)),
        tokens=column([token for event in events for token in event.tokens]),
        admitted_ids=column(admitted, np.int64),
        admitted_at=planned_at,
        logprobs=_logprobs(events, requests, vocab_size),
        prompts=_prompts([requests[event.request_id] for event in events if event.tokens], vocab_size),
    )


def _logprobs(events: list[_Event], requests: dict[int, _Request], vocab_size: int) -> LogprobColumns | None:
    asked = [request.params.logprobs for request in requests.values() if request.params.logprobs is not None]
    if not asked:
        return None
    return _entries([token for event in events for token in event.tokens], max(asked), vocab_size)


def _prompts(requests: list[_Request], vocab_size: int) -> PromptColumns | None:
    """With the first token: the whole prompt of those who asked."""
    asked = {
        request.request_id: (request, request.params.prompt_logprobs)
        for request in requests
        if request.params.prompt_logprobs is not None and len(request.output) == 1
    }
    if not asked:
        return None
    scored = [request.prompt[1:] for request, _ in asked.values()]
    return PromptColumns(
        request_ids=np.array(list(asked), np.int64).tobytes(),
        firsts=np.zeros(len(asked), np.int32).tobytes(),
        lengths=np.array([len(tokens) for tokens in scored], np.int32).tobytes(),
        entries=_entries([*chain(*scored)], max(width for _, width in asked.values()), vocab_size),
    )


def _entries(ids: list[int], width: int, vocab_size: int) -> LogprobColumns:
    """Every token is the most likely one, with -0.5; the ids after it follow, each 1 lower."""
    tokens = np.array(ids, np.int32)
    top_ids = (tokens[:, None] + np.arange(width, dtype=np.int32)) % vocab_size
    top = np.broadcast_to(-0.5 - np.arange(width, dtype=np.float32), top_ids.shape)
    return LogprobColumns(
        logprobs=np.full(len(tokens), -0.5, np.float32).tobytes(),
        ranks=np.ones(len(tokens), np.int32).tobytes(),
        top_ids=top_ids.astype(np.int32).tobytes(),
        top_logprobs=top.astype(np.float32).tobytes(),
        width=width,
    )


def build_fake_engine(config: EngineConfig, progress: Callable[[str, int, int], None] | None = None) -> FakeEngine:
    """The engine of a `FakeOptions.config()`."""
    options = msgspec.json.decode(config.model.removeprefix("fake:"), type=FakeOptions)
    time.sleep(options.load_seconds)
    if options.load_error is not None:
        from sonar_engine.errors import ModelLoadError

        raise ModelLoadError(options.load_error)
    if progress is not None:
        progress("weights", 1, 1)
    return FakeEngine(config, options)
