"""The engine: one target, one drafter, one scheduler, and the loop that moves them together."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
import torch

from sonar_engine._scheduler import Events, Scheduler
from sonar_engine.device import Device, open_device
from sonar_engine.drafters.base import Drafter
from sonar_engine.drafters.registry import DrafterContext, DrafterMethod, drafter_method
from sonar_engine.errors import EngineDeadError, InvalidRequestError, StaleStepError
from sonar_engine.events import StepEvents
from sonar_engine.generation import Generation
from sonar_engine.model_runner import ModelRunner
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.registry import ResolvedModel, resolve_model
from sonar_engine.sampling.prompt_scores import PromptScorer
from sonar_engine.sampling.state import SamplingState
from sonar_engine.sampling.validation import validate
from sonar_engine.schedules.orders import SCHEDULES
from sonar_engine.schedules.planner import StepPlanner
from sonar_engine.schedules.stages import Committed, Machine, StepInFlight, commit, plan
from sonar_engine.schedules.step_costs import CostRequests, measure_step_costs
from sonar_engine.step_buffers import StepBuffers
from sonar_engine.step_statistics import StepStatistics
from sonar_engine.structured.grammars import GrammarCompiler
from sonar_engine.structured.slots import GrammarSlots
from sonar_engine.tokenizer import Tokenizer, load_tokenizer
from sonar_engine.types import Completion, EngineInfo, EngineStats, RequestOutput, SamplingParams, StructuredOutput
from sonar_engine.verification.verifier import Verifier

if TYPE_CHECKING:
    from sonar_engine.config import EngineConfig

Progress = Callable[[str, int, int], None]  # (what, done, total)

FIRST_PROBE_ID = 1 << 62  # request ids of callers are below


class Engine:
    """Runs requests through the target and its drafter. `submit` and `abort` may be called from any thread.

    One thread at a time calls `step`; `generate` and `stream` do so on the caller's behalf.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        info: EngineInfo,
        *,
        device: Device | None = None,
        method: DrafterMethod | None = None,
    ) -> None:
        """`device` and `method` default to the runner's device and the configured way of drafting."""
        self.config = config
        self.tokenizer = tokenizer
        self.info = info
        self._runner = runner
        self._device = open_device(runner.device) if device is None else device
        method = drafter_method(config) if method is None else method
        self._scheduler = _build_scheduler(config, runner, info, method)
        self._compiler = GrammarCompiler(tokenizer, info.vocab_size, info.eos_token_ids)
        self._grammars = GrammarSlots(self._compiler)
        self._sampling = SamplingState(
            config.max_num_seqs, info.vocab_size, runner.device, info.eos_token_ids, self._grammars
        )
        self._statistics = StepStatistics(config.speculative.num_speculative_tokens)
        context = DrafterContext(config, self._scheduler, runner, self._sampling, self._device)
        self._drafter: Drafter = method.build(context)
        self._schedule = SCHEDULES[method.schedule]
        self._machine = self._build_machine()
        self._in_flight: tuple[StepInFlight, float] | None = None  # and when it was planned, time.monotonic()
        self._ready: StepEvents | None = None  # committed, not returned yet
        self._params: dict[int, tuple[SamplingParams, int]] = {}  # request id -> parameters, its own seed
        self._seeds = np.random.default_rng(config.seed)
        self._submit_lock = threading.Lock()
        self._num_probes = 0
        self._generation = Generation(self)
        if config.speculative.draft_length == "adaptive" and info.num_speculative_tokens:
            self._adapt_draft_length(looks_up=method.schedule == "plain")

    def _build_machine(self) -> Machine:
        runner, scheduler, drafter = self._runner, self._scheduler, self._drafter
        buffers = StepBuffers((scheduler.slot(0), scheduler.slot(1)), runner.page_table)
        ahead = self._device.runs_alone if self.config.plan_ahead is None else self.config.plan_ahead
        return Machine(
            device=self._device,
            scheduler=scheduler,
            planner=StepPlanner(scheduler, buffers, drafter, ahead=ahead),
            buffers=buffers,
            runner=runner,
            drafter=drafter,
            sampling=self._sampling,
            verifier=Verifier(self._sampling, runner.cpu_kernels, self.config.speculative),
            grammars=self._grammars,
            scorer=PromptScorer(self.config.max_num_seqs, self.info.vocab_size),
            statistics=self._statistics,
            admit=self._admit,
        )

    # Requests

    def submit(self, request_id: int, prompt: Sequence[int] | np.ndarray, params: SamplingParams) -> None:
        """Queue one sequence. Thread-safe.

        Raises InvalidRequestError (a field that cannot be served, an id already in use) or QueueFullError.
        """
        tokens, params = self.validate(prompt, params)
        if params.structured is not None:
            self._compiler.compile(params.structured)
        with self._submit_lock:
            if request_id in self._params:
                raise InvalidRequestError(f"request id {request_id} is in use", param="request_id")
            seed = params.seed if params.seed is not None else int(self._seeds.integers(-(1 << 63), (1 << 63) - 1))
            self._params[request_id] = (params, seed)
        try:
            self._scheduler.submit(
                request_id,
                tokens,
                max_tokens=params.max_tokens,
                # An end that structured output leaves no way around, it alone is possible below `min_tokens`, ends it.
                min_tokens=params.min_tokens if params.structured is None else 0,
                stop_token_ids=np.asarray(params.stop_token_ids, np.int32),
                ignore_eos=params.ignore_eos,
                priority=params.priority,
                cache_salt=_cache_salt(request_id, params),
                num_speculative_tokens=self._most_drafts(params),
            )
        except Exception:
            del self._params[request_id]
            raise

    def validate(self, prompt: Sequence[int] | np.ndarray, params: SamplingParams) -> tuple[np.ndarray, SamplingParams]:
        """The prompt as int32 [P] and the parameters with defaults filled in; raises InvalidRequestError."""
        tokens = _as_tokens(prompt, self.info.vocab_size)
        checked = validate(
            params,
            vocab_size=self.info.vocab_size,
            max_model_len=self.info.max_model_len,
            num_prompt_tokens=len(tokens),
            eos_token_ids=self.info.eos_token_ids,
        )
        return tokens, checked

    def prepare(self, form: StructuredOutput) -> None:
        """Compile a form of structured output, so that `submit` need not. Thread-safe, may take a second.

        Raises InvalidRequestError.
        """
        self._compiler.compile(form)

    def abort(self, request_id: int) -> None:
        """End a request at whatever point it is; an unknown id is ignored. Thread-safe."""
        self._scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self._ready is not None or self._scheduler.has_work()

    # One step

    @torch.inference_mode()
    def step(self) -> StepEvents | None:
        """One step, in the order of the drafter's schedule. None when nothing was waiting or running.

        On a device that runs alone a step is committed at the start of the next call, and what is returned are the
        events of that step: the caller handles them while the device runs the one just queued.
        """
        self._statistics.start()
        if self._ready is None:  # else the last call failed after its commit
            self._ready = self._settle()
        self._launch()
        if not self._device.runs_alone and self._ready is None:
            self._ready = self._settle()
        events, self._ready = self._ready, None
        return self._events_of(self._scheduler.poll()) if events is None else events

    def _launch(self) -> None:
        """Queues a step's kernels; they stay in flight. Nothing when nothing can run."""
        planned_at = time.monotonic()
        step_id = plan(self._machine)
        if step_id is None:
            self._device.rest()
            self._statistics.rest()
            return
        with self._reverting(step_id):
            self._in_flight = self._schedule(self._machine, step_id), planned_at

    def _settle(self) -> StepEvents | None:
        """Commits the step in flight and gives its events; None when there is no such step."""
        if self._in_flight is None:
            return None
        (step, planned_at), self._in_flight = self._in_flight, None
        with self._reverting(step.batch.step_id):
            done = commit(self._machine, step)
        return self._events_of(done.events, done, planned_at) or StepEvents.none()

    @contextmanager
    def _reverting(self, step_id: int) -> Iterator[None]:
        """Whatever ends a step early, Ctrl-C included, no request loses its pages or its place."""
        try:
            yield
        except BaseException:
            with suppress(StaleStepError):  # it has been committed
                self._scheduler.revert(step_id)
            raise

    def _admit(self, slot: int, request_id: int) -> None:
        """Fills the slot state of a request that enters `slot` with a step."""
        params, seed = self._params[request_id]
        history = self._scheduler.request_tokens(request_id)
        num_prompt = self._scheduler.num_prompt_tokens(request_id)
        self._sampling.admit(slot, params, history[:num_prompt], history[num_prompt:], params_seed=seed)
        self._machine.scorer.admit(slot, request_id, params, num_prompt)
        self._drafter.admit(slot, request_id, self._most_drafts(params))

    def _events_of(
        self, events: Events | None, done: Committed | None = None, admitted_at: float = 0.0
    ) -> StepEvents | None:
        if events is None:
            return None
        for request_id in events.request_ids[events.finish != 0].tolist():
            self._params.pop(request_id, None)
        if done is None:
            return StepEvents.of(events)
        for request_id in done.failed.tolist():
            self.abort(request_id)
        return StepEvents.of(events, done.logprobs, done.prompts, done.admitted, admitted_at, failed=done.failed)

    def _most_drafts(self, params: SamplingParams) -> int:
        config = self.config.speculative
        if config.method == "none" or not params.speculative_enabled:
            return 0
        own = params.num_speculative_tokens
        return config.num_speculative_tokens if own is None else min(own, config.num_speculative_tokens)

    # Whole generations

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Completion]:
        """Run all prompts to their end and return the completions in order.

        `on_text(index, text)` is called with every prompt's new text as it comes.
        Raises InvalidRequestError before anything runs when one of the prompts cannot be served.
        """
        return self._generation.generate(prompts, params, on_text)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams) -> AsyncIterator[RequestOutput]:
        """New tokens of one sequence as they come; closing the iterator aborts the request."""
        return self._generation.stream(prompt, params)

    # State

    def stats(self) -> EngineStats:
        """Counters since start and gauges of now. Thread-safe."""
        gauges, totals = self._scheduler.stats(), self._statistics
        used = gauges.num_pages - gauges.num_free_pages - gauges.num_cached_pages
        return EngineStats(
            num_running=gauges.num_running,
            num_waiting=gauges.num_waiting,
            num_pages=gauges.num_pages,
            num_free_pages=gauges.num_free_pages,
            num_cached_pages=gauges.num_cached_pages,
            kv_cache_usage=used / gauges.num_pages,
            prefix_queries=gauges.prefix_queries,
            prefix_hits=gauges.prefix_hits,
            num_preemptions=gauges.num_preemptions,
            num_steps=totals.num_steps,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            num_drafts=totals.num_drafts,
            num_draft_tokens=totals.num_draft_tokens,
            num_accepted_tokens=totals.num_accepted_tokens,
            accepted_per_pos=totals.accepted_per_pos,
            step_seconds=dict(totals.step_seconds),
            device_idle_seconds=self._device.idle_seconds,
            draft_length=gauges.draft_length,
        )

    @property
    def weight_bytes(self) -> int:
        """Memory of the target's parameters as loaded."""
        return self._runner.weight_bytes

    @property
    def kv_cache_bytes(self) -> int:
        return self._runner.kv_cache_bytes

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; pages that running requests own stay theirs."""
        return self._scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raises when a page or length invariant of the scheduler is broken."""
        self._scheduler.check_integrity()

    def probe(self) -> None:
        """Prove that steps advance: an idle engine runs a one-token request; a busy one needs no proof."""
        if self.has_work():
            return
        request_id = self._submit_own(max_tokens=1)
        while request_id in self._params:
            if self.step() is None and not self.has_work():
                raise EngineDeadError("the probe request vanished without an end")

    def _submit_own(self, max_tokens: int) -> int:
        """The id of a new request of the engine's own."""
        self._num_probes += 1
        request_id = FIRST_PROBE_ID + self._num_probes
        token = self.info.eos_token_ids[0] if self.info.eos_token_ids else 0
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
        self.submit(request_id, [token], params)
        return request_id

    def _drop_own(self, request_id: int) -> None:
        self.abort(request_id)
        self._params.pop(request_id, None)

    @torch.inference_mode()
    def _adapt_draft_length(self, looks_up: bool) -> None:
        """Measures what steps cost, then leaves the draft length to the scheduler's policy."""
        requests = CostRequests(self._submit_own, self._drop_own, self.config, self.info.max_model_len)
        most = self.info.num_speculative_tokens
        points = measure_step_costs(self._machine, self._schedule, requests, most, looks_up=looks_up)
        self.reset_prefix_cache()
        if points:  # else no sequence has room for drafts
            self._scheduler.adapt_draft_length(points)

    def close(self) -> None:
        """Abort what runs and stop the streaming thread. The engine cannot be used afterwards."""
        self._generation.close()


def find_models(config: EngineConfig, method: DrafterMethod) -> tuple[ResolvedModel, Tokenizer, int]:
    """The target, its tokenizer, and the bytes a token of a drafter that goes with them; reads no weights.

    Raises ConfigError or ModelLoadError.
    """
    resolved = resolve_model(config.model)
    ModelConfig.load(resolved.path)  # an unsupported model is named before its tokenizer is missed
    tokenizer = load_tokenizer(resolve_model(config.tokenizer) if config.tokenizer else resolved)
    return resolved, tokenizer, method.kv_bytes_per_token(config, resolved, tokenizer)


def build_engine(config: EngineConfig, progress: Progress | None = None, method: DrafterMethod | None = None) -> Engine:
    """Resolve, load and warm up `config.model`. `method` replaces the configured way of drafting.

    Raises ConfigError or ModelLoadError, each with the way out.
    """
    method = drafter_method(config) if method is None else method
    resolved, tokenizer, drafter_bytes = find_models(config, method)
    runner = ModelRunner.load(config, resolved, progress, drafter_bytes)
    from sonar_engine import __version__

    info = EngineInfo(
        model_name=resolved.name,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        eos_token_ids=sorted({*tokenizer.eos_token_ids, *runner.eos_token_ids}),
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
        num_pages=runner.num_pages,
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        drafter=config.speculative.method,
        num_speculative_tokens=config.speculative.num_speculative_tokens if config.speculative.method != "none" else 0,
        lossy=config.speculative.lossy is not None,
        version=__version__,
        generation_defaults=dict(runner.config.generation_defaults),
    )
    return Engine(config, runner, tokenizer, info, method=method)


def _build_scheduler(config: EngineConfig, runner: ModelRunner, info: EngineInfo, method: DrafterMethod) -> Scheduler:
    return Scheduler(
        page_size=config.page_size,
        num_pages=info.num_pages,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_waiting=config.max_waiting,
        enable_prefix_caching=config.enable_prefix_caching,
        num_speculative_tokens=info.num_speculative_tokens,
        eos_token_ids=np.asarray(info.eos_token_ids, np.int32),
        cache_key=np.random.default_rng().bytes(32),
        page_hash_covers_next_token=method.needs_hidden != "none",
        speculate_in_mixed_batches=config.speculative.speculate_in_mixed_batches,
    )


def _cache_salt(request_id: int, params: SamplingParams) -> bytes | None:
    """A prompt that is scored has to be computed: it shares its pages with nobody, under a salt that is no UTF-8."""
    if params.prompt_logprobs is not None:
        return b"\xff%d" % request_id
    return None if params.cache_salt is None else params.cache_salt.encode()


def _as_tokens(prompt: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """int32 [P]; ids are checked here since a conversion would wrap those beyond 32 bits."""
    if len(prompt) == 0:
        raise InvalidRequestError("the prompt is empty; give at least one token", param="prompt")
    try:
        tokens = np.asarray(prompt, np.int64)
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"prompt token ids must be integers ({error})", param="prompt") from error
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(wrong):
        raise InvalidRequestError(
            f"prompt token id {int(wrong[0])} is out of range; ids are 0 to {vocab_size - 1}", param="prompt"
        )
    return tokens.astype(np.int32)
