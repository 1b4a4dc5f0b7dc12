"""Cost of one decode step in the scheduler: plan (with packing) and commit, called from Python."""

from __future__ import annotations

import time

import numpy as np

from sonar_engine._scheduler import Scheduler
from sonar_engine.bench.report import Measurement
from sonar_engine.errors import ConfigError
from sonar_engine.step_buffers import HEADER

PROMPT_LEN = 256
PAGE_SIZE = 16
VOCAB_SIZE = 32_000
NUM_PATTERNS = 16  # acceptance patterns made before the clock runs, used in turn
WARM_UP_STEPS = 20
MICROSECONDS = 1e6


def measure_scheduler(num_requests: int, num_drafts: int, num_steps: int, seed: int = 0) -> Measurement:
    """Median microseconds a step with `num_requests` decoding, each given `num_drafts` drafts.

    Every request emits 1 to num_drafts + 1 tokens a step, drawn uniformly. Prompts differ; the prefix cache is on.
    """
    random = np.random.default_rng(seed)
    scheduler = _build(num_requests, num_drafts, num_steps + WARM_UP_STEPS)
    _fill(scheduler, num_requests, random)
    draft_lens = np.full(num_requests, num_drafts, np.int32) if num_drafts else None
    emitted = [random.integers(1, num_drafts + 2, num_requests, np.int32) for _ in range(NUM_PATTERNS)]
    tokens = [random.integers(0, VOCAB_SIZE, (num_requests, num_drafts + 1), np.int32) for _ in range(NUM_PATTERNS)]
    plan_times, commit_times = [], []
    for step in range(WARM_UP_STEPS + num_steps):
        before = time.perf_counter()
        step_id = scheduler.plan(step % 2, draft_lens) or 0
        planned = time.perf_counter()
        scheduler.commit(step_id, emitted[step % NUM_PATTERNS], tokens[step % NUM_PATTERNS])
        plan_times.append(planned - before)
        commit_times.append(time.perf_counter() - planned)
    header = scheduler.slot((WARM_UP_STEPS + num_steps - 1) % 2)
    granted = int(header[HEADER["num_draft_tokens"]])
    if granted != num_requests * num_drafts:
        raise ConfigError(f"the scheduler granted {granted} drafts of {num_requests * num_drafts}; lower --steps")
    plan = np.array(plan_times[WARM_UP_STEPS:]) * MICROSECONDS
    commit = np.array(commit_times[WARM_UP_STEPS:]) * MICROSECONDS
    return {
        "requests": num_requests,
        "drafts": num_drafts,
        "prompt_len": PROMPT_LEN,
        "steps": num_steps,
        "us_per_step": float(np.median(plan + commit)),
        "us_plan": float(np.median(plan)),
        "us_commit": float(np.median(commit)),
        "us_per_step_p99": float(np.percentile(plan + commit, 99)),
    }


def _build(num_requests: int, num_drafts: int, num_steps: int) -> Scheduler:
    """A scheduler with room for every request to emit as much as it can in `num_steps`."""
    longest = PROMPT_LEN + (num_steps + 2) * (num_drafts + 1) + num_drafts + 2
    pages_each = -(-longest // PAGE_SIZE) + 1
    return Scheduler(
        page_size=PAGE_SIZE,
        num_pages=num_requests * pages_each,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * max(PROMPT_LEN, num_drafts + 1),
        max_model_len=longest,
        vocab_size=VOCAB_SIZE,
        max_waiting=num_requests,
        enable_prefix_caching=True,
        num_speculative_tokens=num_drafts,
        eos_token_ids=np.array([0], np.int32),
        cache_key=bytes(32),
    )


def _fill(scheduler: Scheduler, num_requests: int, random: np.random.Generator) -> None:
    """Submits all requests and runs their prompts, so that every later step decodes all of them."""
    for request_id in range(1, num_requests + 1):
        prompt = random.integers(0, VOCAB_SIZE, PROMPT_LEN, np.int32)
        scheduler.submit(request_id, prompt, max_tokens=None, ignore_eos=True)
    num_admitted = 0
    while num_admitted < num_requests:  # more than one step only where a packed slot cannot hold all prompts
        step_id = scheduler.plan(0, None) or 0  # ids start at 1: with nothing planned, commit says what is wrong
        header = scheduler.slot(0)
        rows = int(header[HEADER["num_reqs"]])
        num_admitted += int(header[HEADER["num_admitted"]])
        scheduler.commit(step_id, np.ones(rows, np.int32), np.ones((rows, 1), np.int32))
