"""What the host does while the device runs: the engine's own loop on a simulated device with given kernel times."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np

from sonar_engine.bench.report import Measurement
from sonar_engine.testing.simulated_device import KernelTimes, SimulatedDevice
from sonar_engine.testing.simulated_engine import SimulatedEngine, SimulatedSchedule
from sonar_engine.testing.simulated_model import VOCAB_SIZE
from sonar_engine.testing.timeline import Lane, Timeline
from sonar_engine.types import SamplingParams

PROMPT_LEN = 64
WARM_UP_STEPS = 10  # decode steps before the measured ones
TRACED_STEPS = 20
MILLISECONDS = 1e3
MICROSECONDS = 1e6


@dataclass(frozen=True)
class OverlapSettings:
    """Times in seconds. `draft` is one pass of the drafter over a token a row, `ingest` its pass behind verification.

    A plan takes `planning` at least, on the planner's thread.
    """

    schedule: SimulatedSchedule
    requests: int
    drafts: int
    steps: int
    target: float
    draft: float
    ingest: float
    planning: float


def measure_overlap(settings: OverlapSettings) -> tuple[Measurement, Timeline]:
    """`steps` decode steps of all requests, after their prompts; the figures and the timeline of these steps."""
    device = SimulatedDevice(KernelTimes(settings.target, settings.draft, settings.ingest))
    engine = _engine(settings, device)
    _submit(engine, settings)
    gc.collect()
    gc.freeze()  # as the engine's process does
    try:
        while engine.stats().prompt_tokens < settings.requests * PROMPT_LEN:
            engine.step()
        first = device.step + WARM_UP_STEPS
        while device.step < first + settings.steps:
            engine.step()
    finally:
        gc.unfreeze()
        engine.close()
    timeline = device.timeline.between(first, first + settings.steps)
    return _figures(settings, engine, timeline), timeline


def chrome_trace(timeline: Timeline, num_steps: int = TRACED_STEPS) -> dict[str, Any]:
    """The first steps in Chrome's trace event format, which Perfetto opens; a lane is a thread."""
    first = min(each.step for each in timeline.intervals)
    shown = timeline.between(first, first + num_steps)
    begin = min(each.start for each in shown.intervals)
    lanes: dict[Lane, int] = {"host": 1, "planner": 2, "device": 3}
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": lane}}
        for lane, thread in lanes.items()
    ]
    spans = [
        {
            "name": each.name,
            "ph": "X",
            "pid": 1,
            "tid": lanes[each.lane],
            "ts": (each.start - begin) * MICROSECONDS,
            "dur": each.seconds * MICROSECONDS,
            "args": {"step": each.step},
        }
        for each in shown.intervals
        if each.lane in lanes
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + spans}


def _engine(settings: OverlapSettings, device: SimulatedDevice) -> SimulatedEngine:
    most_tokens = PROMPT_LEN + (settings.steps + 2 * WARM_UP_STEPS + 8) * (settings.drafts + 1)
    return SimulatedEngine(
        device,
        settings.schedule,
        max_num_seqs=settings.requests,
        num_drafts=settings.drafts,
        max_model_len=most_tokens + 1,
        max_num_batched_tokens=settings.requests * max(PROMPT_LEN, settings.drafts + 1),
        planning_seconds=settings.planning,
    )


def _submit(engine: SimulatedEngine, settings: OverlapSettings) -> None:
    max_tokens = engine.info.max_model_len - PROMPT_LEN - 1
    prompts = np.random.default_rng(0).integers(1, VOCAB_SIZE, (settings.requests, PROMPT_LEN))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for request_id, prompt in enumerate(prompts):
        engine.submit(request_id, prompt, params)


def _figures(settings: OverlapSettings, engine: SimulatedEngine, timeline: Timeline) -> Measurement:
    kernels = timeline.of("device")
    stats = engine.stats()

    def of_step(lane: Lane, name: str) -> float:
        return sum(each.seconds for each in timeline.of(lane, name)) / settings.steps * MILLISECONDS

    host = {f"host_ms_{name}": of_step("host", name) for name in ("load", "propose", "verify", "fetch", "ingest")}
    plan_wait, verdict_wait = of_step("waits", "plan"), of_step("waits", "verdict")
    host |= {
        "host_ms_commit": of_step("host", "commit"),
        "host_ms_plan": of_step("host", "plan") - plan_wait,
        "wait_ms_plan": plan_wait,
        "wait_ms_verdict": verdict_wait,
    }
    return {
        "schedule": settings.schedule,
        "requests": settings.requests,
        "drafts": settings.drafts,
        "planning_ms": settings.planning * MILLISECONDS,
        "steps": settings.steps,
        "device_idle_share": timeline.device_idle_share(),
        "step_ms": (kernels[-1].end - kernels[0].start) / settings.steps * MILLISECONDS,
        "acceptance_length": 1 + stats.num_accepted_tokens / stats.num_drafts,
        **host,
    }
