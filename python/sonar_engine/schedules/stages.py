"""The stages of a step. `schedules.orders` puts them in order; each is named for profilers and booked to a counter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from sonar_engine._scheduler import Events, Scheduler
from sonar_engine.device import Device, HostCopy
from sonar_engine.drafters.base import Draft, Drafter, Verdict
from sonar_engine.events import LogprobColumns, PromptColumns
from sonar_engine.model_runner import ModelRunner
from sonar_engine.sampling.logprobs import LogprobTensors
from sonar_engine.sampling.prompt_scores import PromptScorer, PromptScores, PromptSpans
from sonar_engine.sampling.state import SamplingState
from sonar_engine.schedules.planner import StepPlanner
from sonar_engine.step_buffers import BatchMetadata, StepBuffers
from sonar_engine.step_statistics import StepStatistics
from sonar_engine.structured.slots import GrammarSlots
from sonar_engine.verification.verifier import Verifier


@dataclass(frozen=True)
class Machine:
    """What a step runs on: one target, one drafter, one scheduler, one device."""

    device: Device
    scheduler: Scheduler
    planner: StepPlanner
    buffers: StepBuffers
    runner: ModelRunner
    drafter: Drafter
    sampling: SamplingState
    verifier: Verifier
    grammars: GrammarSlots
    scorer: PromptScorer
    statistics: StepStatistics
    admit: Callable[[int, int], None]  # (slot, request id): fills the slot's state

    @contextmanager
    def stage(self, name: str, counter: str) -> Iterator[None]:
        """The host's time in it goes to `counter`, one of `step_statistics.STAGES`."""
        with self.device.stage(name):
            yield
        self.statistics.lap(counter)


@dataclass(frozen=True)
class Verified:
    """What the target's pass over a batch gave, on the device."""

    hidden: torch.Tensor  # [T, H]
    verdict: Verdict
    logprobs: LogprobTensors | None
    prompts: PromptScores | None


@dataclass(frozen=True)
class StepInFlight:
    """A step whose kernels have been queued and whose results are on their way to the host."""

    batch: BatchMetadata
    verdict: Verdict
    results: HostCopy  # num_emitted, tokens, then the fields of LogprobTensors: of the output, of prompts, if any
    prompts: PromptSpans | None


@dataclass(frozen=True)
class Committed:
    """A step that is over, on the host."""

    events: Events
    logprobs: LogprobColumns | None
    prompts: PromptColumns | None
    admitted: np.ndarray  # int64 [A], ids of requests that entered a slot with it
    failed: np.ndarray  # int64 [F], ids of requests that cannot go on


def plan(machine: Machine) -> int | None:
    """The id of the next step, packed into its slot; None: nothing can run."""
    with machine.stage("plan", "plan"):
        return machine.planner.take()


def load(machine: Machine, step_id: int) -> BatchMetadata:
    """The batch as tensors; requests that enter a slot with it get their state."""
    with machine.stage("load", "plan"):
        batch = machine.buffers.load(step_id)
        for slot, request_id in batch.admitted:
            machine.admit(slot, request_id)
    machine.device.begin_step()
    return batch


def propose(machine: Machine, batch: BatchMetadata) -> Draft | None:
    """The drafter's tokens."""
    with machine.stage("propose", "draft"):
        return machine.drafter.propose(batch)


def verify(machine: Machine, batch: BatchMetadata, draft: Draft | None) -> Verified:
    """One target pass over every row's tokens and drafts, then acceptance at each sampled position."""
    with machine.stage("verify", "verify"):
        hidden = machine.runner.forward(batch, draft)  # [T, H]
        logits = machine.runner.logits(hidden, batch.sample_rows)  # [S, V] fp32
        verdict, logprobs = machine.verifier.verify(logits, batch, draft)
        return Verified(hidden, verdict, logprobs, machine.scorer.score(batch, hidden, machine.runner.logits))


def fetch(machine: Machine, batch: BatchMetadata, verified: Verified) -> StepInFlight:
    """Starts the one copy of the step to the host. It waits for the verdict, not for what is queued behind it."""
    with machine.stage("fetch", "verify"):
        verdict, prompts = verified.verdict, verified.prompts
        tensors = [verdict.num_emitted, verdict.tokens, *(verified.logprobs or ())]
        if prompts is not None:
            tensors += prompts.entries
        results = machine.device.copy_to_host(tensors)
        verdict = replace(verdict, on_host=results)
        return StepInFlight(batch, verdict, results, None if prompts is None else prompts.spans)


def ingest(machine: Machine, step: StepInFlight, hidden: torch.Tensor) -> None:
    """The drafter runs over what the target saw."""
    with machine.stage("ingest", "ingest"):
        machine.drafter.ingest(step.batch, hidden, step.verdict)


def commit(machine: Machine, step: StepInFlight) -> Committed:
    """Lengths, pages and stop rules by the verdict, as soon as it is on the host; then the next plan may start."""
    with machine.stage("wait", "verify"):
        num_emitted, tokens, *logprobs = step.results.wait()
        of_output, of_prompts = (logprobs, []) if step.prompts is None else (logprobs[:-4], logprobs[-4:])
    with machine.stage("commit", "commit"):
        seconds = machine.statistics.end_step()
        events = machine.scheduler.commit(step.batch.step_id, num_emitted, tokens, seconds)
        machine.planner.start()
        machine.sampling.observe(step.batch, step.verdict)
        failed = machine.grammars.observe(step.batch, events)
        machine.statistics.count(step.batch, events)
        columns = _output_columns(of_output, step.batch, events) if of_output else None
        prompts = None if step.prompts is None else _prompt_columns(of_prompts, step.prompts)
        admitted = np.array([request_id for _, request_id in step.batch.admitted], np.int64)
    return Committed(events, columns, prompts, admitted, failed)


def _output_columns(logprobs: list[np.ndarray], batch: BatchMetadata, events: Events) -> LogprobColumns:
    """The fields of LogprobTensors, [S] or [S, M], in the order of `events.tokens`.

    An event's tokens sit at its row's first samples.
    """
    num_tokens = events.num_tokens
    starts = batch.host["sample_indptr"][np.maximum(events.batch_rows, 0)]
    ends = np.cumsum(num_tokens)
    within = np.arange(len(events.tokens)) - np.repeat(ends - num_tokens, num_tokens)
    rows = np.repeat(starts, num_tokens) + within
    return _columns([field[rows] for field in logprobs])


def _prompt_columns(logprobs: list[np.ndarray], spans: PromptSpans) -> PromptColumns:
    return PromptColumns(
        request_ids=spans.request_ids.tobytes(),
        firsts=spans.firsts.tobytes(),
        lengths=spans.lengths.tobytes(),
        entries=_columns(logprobs),
    )


def _columns(logprobs: list[np.ndarray]) -> LogprobColumns:
    chosen, ranks, top_ids, top_logprobs = logprobs
    return LogprobColumns(
        logprobs=chosen.tobytes(),
        ranks=ranks.tobytes(),
        top_ids=top_ids.tobytes(),
        top_logprobs=top_logprobs.tobytes(),
        width=top_ids.shape[1],
    )
