"""The engine's own loop beside a simulated device, in virtual time: what overlaps, what waits, and what survives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from sonar_engine.bench.overlap import OverlapSettings, chrome_trace, measure_overlap
from sonar_engine.schedules.stages import Machine, StepInFlight, fetch, ingest, load, propose, verify
from sonar_engine.step_buffers import BatchMetadata, StepBuffers
from sonar_engine.testing.simulated_clock import VirtualClock
from sonar_engine.testing.simulated_device import KernelTimes, SimulatedDevice
from sonar_engine.testing.simulated_engine import SimulatedEngine
from sonar_engine.testing.simulated_model import next_tokens
from sonar_engine.testing.timeline import Interval, Timeline
from sonar_engine.types import SamplingParams

MS = 1e-3
TIMES = KernelTimes(verify=20 * MS, propose=5 * MS, ingest=5 * MS)
STAGE_SECONDS = 0.1 * MS  # of the host
EXACT = 1e-9
NUM_REQUESTS, NUM_DRAFTS = 8, 3
FIRST, END = 4, 24  # steps that only decode

both_schedules = pytest.mark.parametrize("schedule", ["draft_target", "mtp"])


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def build(schedule: Any, **options: Any) -> tuple[SimulatedEngine, SimulatedDevice]:
    device = SimulatedDevice(TIMES, VirtualClock(STAGE_SECONDS))
    engine = SimulatedEngine(device, schedule, **{"max_num_seqs": NUM_REQUESTS, "num_drafts": NUM_DRAFTS, **options})
    return engine, device


def decode(schedule: Any, **options: Any) -> Timeline:
    """The steps FIRST..END of requests that decode all the time."""
    engine, device = build(schedule, **options)
    for request_id in range(NUM_REQUESTS):
        engine.submit(request_id, [request_id + 1, 2, 3], greedy(500))
    while device.step < END:
        engine.step()
    engine.close()
    return device.timeline.between(FIRST, END)


def step(engine: SimulatedEngine, texts: dict[int, list[int]]) -> None:
    """One step; its tokens go to `texts`, by request."""
    events = engine.step()
    if events is not None and events.request_ids:
        ids, tokens = np.frombuffer(events.request_ids, np.int64), np.frombuffer(events.tokens, np.int32)
        ends = np.cumsum(np.frombuffer(events.num_tokens, np.int32))
        for request_id, part in zip(ids.tolist(), np.split(tokens, ends[:-1]), strict=True):
            texts.setdefault(request_id, []).extend(part.tolist())


def run_to_end(engine: SimulatedEngine, texts: dict[int, list[int]] | None = None) -> dict[int, list[int]]:
    """Output tokens by request, behind those in `texts`."""
    texts = {} if texts is None else texts
    while engine.has_work():
        step(engine, texts)
    return texts


def by_the_rule(prompt: list[int], num_tokens: int) -> list[int]:
    """What the simulated target says after `prompt`."""
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(int(next_tokens(torch.tensor(text[-1]), torch.tensor(len(text) - 1))))
    return text[len(prompt) :]


# What overlaps


def assert_planning_is_hidden(timeline: Timeline) -> None:
    """Every plan begins and ends while the step before runs its ingest pass, and the device is never without work."""
    plans, passes = timeline.of("planner")[1:], timeline.of("device", "ingest")
    assert len(plans) == END - FIRST - 1
    for plan, ingesting in zip(plans, passes, strict=False):
        assert plan.step == ingesting.step + 1
        assert ingesting.start <= plan.start < plan.end <= ingesting.end + EXACT
    assert not list(timeline.idle_gaps())


def assert_the_host_waits_once_a_step(timeline: Timeline) -> None:
    """For the one copy to the host, which is there when the target's pass is done, not the drafter's behind it."""
    for name, intervals in {"to host": timeline.of("copies"), "verdict": timeline.of("waits", "verdict")}.items():
        assert [each.step for each in intervals] == list(range(FIRST, END)), name
    for copy, verified in zip(timeline.of("copies"), timeline.of("device", "verify"), strict=True):
        assert copy.end == pytest.approx(verified.end)


@both_schedules
@pytest.mark.parametrize("planning", [0.0, 4 * MS], ids=["quick plans", "slow plans"])
def test_the_ingest_pass_hides_commit_and_planning(schedule: str, planning: float) -> None:
    assert_planning_is_hidden(decode(schedule, planning_seconds=planning))


@both_schedules
def test_the_host_waits_once_a_step_for_one_copy(schedule: str) -> None:
    assert_the_host_waits_once_a_step(decode(schedule))


@both_schedules
def test_what_a_plan_takes_beyond_the_ingest_pass_is_what_the_device_idles(schedule: str) -> None:
    timeline = decode(schedule, planning_seconds=9 * MS)
    with pytest.raises(AssertionError):
        assert_planning_is_hidden(timeline)
    gaps = [end - start for start, end in timeline.idle_gaps()]
    # From the verdict on: the commit, the plan, then the stages `load` and `propose` until the first kernel.
    assert gaps == pytest.approx([9 * MS + 3 * STAGE_SECONDS - TIMES.ingest] * (END - FIRST - 1), abs=STAGE_SECONDS)
    assert timeline.device_idle_share() == pytest.approx(4.3 / (20 + 2 * 5 + 5 + 4.3), abs=0.01)


@both_schedules
def test_the_drafters_passes_follow_each_other_and_the_target_without_a_gap(schedule: str) -> None:
    kernels = decode(schedule).of("device")
    order = [each.name for each in kernels]
    one_step = ["propose"] * (NUM_DRAFTS - 1) + ["verify", "ingest"]
    assert order == one_step * (END - FIRST)
    assert all(after.start == before.end for before, after in pairwise(kernels))


def waiting_before_ingest(machine: Machine, step_id: int) -> StepInFlight:
    """`draft_target`, but for a host that wants the verdict before it queues the drafter's pass."""
    batch = load(machine, step_id)
    verified = verify(machine, batch, propose(machine, batch))
    in_flight = fetch(machine, batch, verified)
    in_flight.results.wait()
    ingest(machine, in_flight, verified.hidden)
    machine.device.end_step()
    return in_flight


@both_schedules
def test_a_schedule_that_waits_before_the_ingest_pass_is_found_out(schedule: str) -> None:
    timeline = decode(schedule, order=waiting_before_ingest)
    with pytest.raises(AssertionError):
        assert_planning_is_hidden(timeline)
    assert len(list(timeline.idle_gaps())) >= END - FIRST - 1


@both_schedules
def test_a_second_copy_to_the_host_is_found_out(schedule: str) -> None:
    def copying_twice(machine: Machine, step_id: int) -> StepInFlight:
        batch = load(machine, step_id)
        verified = verify(machine, batch, propose(machine, batch))
        machine.device.copy_to_host([verified.verdict.num_emitted])
        in_flight = fetch(machine, batch, verified)
        ingest(machine, in_flight, verified.hidden)
        return in_flight

    with pytest.raises(AssertionError):
        assert_the_host_waits_once_a_step(decode(schedule, order=copying_twice))


# Slots


def rewrites(timeline: Timeline) -> Iterator[tuple[Interval, Interval]]:
    """(plan, reader): plans into a slot that a kernel, a copy or a stage of an earlier step may still read."""
    readers = [each for each in timeline.intervals if each.lane in ("device", "copies", "host")]
    for plan in timeline.of("planner"):
        for reader in readers:
            if reader.step < plan.step and reader.slot == plan.slot and reader.end > plan.start:
                yield plan, reader


@both_schedules
@pytest.mark.parametrize("planning", [0.0, 4 * MS, 9 * MS])
def test_no_plan_is_written_into_a_slot_that_is_still_read(schedule: str, planning: float) -> None:
    timeline = decode(schedule, planning_seconds=planning)
    assert not list(rewrites(timeline))
    assert {each.slot for each in timeline.of("planner")} == {0, 1}


@both_schedules
def test_planning_into_one_slot_only_is_found_out(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load_next = StepBuffers.load

    def load_slot_0(self: StepBuffers, step_id: int) -> BatchMetadata:
        batch = load_next(self, step_id)
        self._next = 0
        return batch

    monkeypatch.setattr(StepBuffers, "load", load_slot_0)
    assert len(list(rewrites(decode(schedule)))) >= END - FIRST - 1


# What survives


@both_schedules
@pytest.mark.parametrize("wrong_every", [0, 3])
def test_overlapped_steps_give_the_targets_own_tokens(schedule: str, wrong_every: int) -> None:
    engine, _ = build(schedule, wrong_every=wrong_every)
    prompts = [[1 + index % 7] * (1 + index % 5) for index in range(2 * NUM_REQUESTS)]
    texts: dict[int, list[int]] = {}
    for request_id, prompt in enumerate(prompts):  # requests come and go all the time
        engine.submit(request_id, prompt, greedy(5 + 3 * request_id))
        step(engine, texts)
    run_to_end(engine, texts)
    for request_id, prompt in enumerate(prompts):
        assert texts[request_id] == by_the_rule(prompt, 5 + 3 * request_id)
    stats = engine.stats()
    assert stats.num_draft_tokens > 0
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) == (wrong_every == 0)
    engine.check_integrity()
    assert stats.kv_cache_usage == 0
    engine.close()


@both_schedules
@pytest.mark.parametrize("stage", ["propose", "ingest"])
def test_a_step_that_fails_when_it_is_queued_is_reverted_and_run_again(
    schedule: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = build(schedule)
    texts: dict[int, list[int]] = {}
    for request_id in range(3):
        engine.submit(request_id, [request_id + 1, 2], greedy(60))
    for _ in range(5):
        step(engine, texts)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(engine._drafter, stage, failing)
        engine.step()
    run_to_end(engine, texts)
    assert texts == {request_id: by_the_rule([request_id + 1, 2], 60) for request_id in range(3)}
    engine.check_integrity()
    assert engine.stats().kv_cache_usage == 0
    engine.close()


@both_schedules
def test_a_step_whose_verdict_never_comes_is_reverted_and_run_again(schedule: str) -> None:
    engine, _ = build(schedule, wrong_every=0)
    engine.submit(1, [5, 2], greedy(60))
    texts: dict[int, list[int]] = {}
    for _ in range(3):
        step(engine, texts)
    assert engine._in_flight is not None
    results = engine._in_flight[0].results
    wait, results.wait = results.wait, failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    results.wait = wait  # type: ignore[method-assign]
    assert run_to_end(engine, texts) == {1: by_the_rule([5, 2], 60)}
    engine.check_integrity()
    engine.close()


def failing(*arguments: object) -> Any:
    raise RuntimeError("out of memory")


# The measurement


def test_idle_time_is_counted_between_steps_and_not_while_nothing_waits() -> None:
    engine, device = build("draft_target", planning_seconds=9 * MS)
    engine.submit(1, [1, 2, 3], greedy(40))
    run_to_end(engine)
    counted = engine.stats().device_idle_seconds
    assert counted > 0
    device.clock.wait_until(device.clock.now() + 100.0)
    engine.submit(2, [1, 2, 3], greedy(1))
    run_to_end(engine)
    assert engine.stats().device_idle_seconds < counted + 1.0
    engine.close()


@both_schedules
def test_the_overlap_bench_counts_the_steps_it_is_asked_for(schedule: Any) -> None:
    settings = OverlapSettings(
        schedule, requests=4, drafts=2, steps=6, target=2 * MS, draft=MS, ingest=MS, planning=5 * MS
    )
    figures, timeline = measure_overlap(settings)
    assert len(timeline.of("device", "verify")) == 6
    assert float(figures["step_ms"] or 0) >= 4.0  # what the kernels take
    assert 0 < float(figures["device_idle_share"] or 0) < 1  # a plan takes longer than the pass that hides it
    assert 1 < float(figures["acceptance_length"] or 0) <= 3


def test_a_trace_has_the_lanes_of_host_planner_and_device() -> None:
    events = chrome_trace(decode("mtp"), num_steps=5)["traceEvents"]
    lanes = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    spans = [each for each in events if each["ph"] == "X"]
    assert set(lanes.values()) == {"host", "planner", "device"}
    assert {each["tid"] for each in spans} == set(lanes)
    verified = [each for each in spans if each["name"] == "verify" and lanes[each["tid"]] == "device"]
    assert [each["dur"] for each in verified] == pytest.approx([20_000.0] * 5)
    assert min(each["ts"] for each in spans) == 0
