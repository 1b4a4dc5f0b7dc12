"""The scheduler's threads through Python: its planner, callers beside it, the interpreter's lock."""

from __future__ import annotations

import gc
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from scheduler_calls import assert_idle, commit, ids, make, section
from sonar_engine import errors


def test_the_planner_thread_plans_what_plan_would() -> None:
    scheduler = make()
    with pytest.raises(errors.StaleStepError, match="no plan has been started"):
        scheduler.take_plan()
    scheduler.submit(1, ids(1, 2))
    scheduler.start_plan(1, None)
    with pytest.raises(errors.StaleStepError, match="take it before"):
        scheduler.start_plan(0, None)
    step = scheduler.take_plan()
    assert step is not None
    assert section(scheduler.slot(1), "token_ids").tolist() == [1, 2]
    commit(scheduler, step, slot=1)
    scheduler.start_plan(0, np.full(8, 2, np.int32))
    step = scheduler.take_plan()
    assert step is not None
    assert section(scheduler.slot(0), "num_draft_tokens").tolist() == [2]
    scheduler.start_plan(1, None)
    with pytest.raises(errors.StaleStepError, match="still in flight"):
        scheduler.take_plan()
    commit(scheduler, step)
    scheduler.abort(1)
    scheduler.start_plan(0, None)
    assert scheduler.take_plan() is None
    scheduler.poll()
    assert_idle(scheduler)


def test_threads_submit_and_abort_while_steps_are_planned() -> None:
    scheduler = make(max_waiting=1000, num_pages=40, max_num_batched_tokens=16)
    num_threads, per_thread = 4, 30

    def submit(first: int) -> None:
        for request_id in range(first, first + per_thread):
            scheduler.submit(request_id, np.full(request_id % 7 + 1, request_id % 5, np.int32), max_tokens=6)
            if request_id % 3 == 0:
                scheduler.abort(request_id)

    threads = [threading.Thread(target=submit, args=(1000 * i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    ended: list[int] = []
    deadline = time.monotonic() + 60
    while any(thread.is_alive() for thread in threads) or scheduler.has_work():
        assert time.monotonic() < deadline
        scheduler.start_plan(0, np.full(8, 3, np.int32))
        step = scheduler.take_plan()
        events = scheduler.poll() if step is None else commit(scheduler, step, accepted=1)
        if events is not None:
            ended += events.request_ids[events.finish != 0].tolist()
    expected = [1000 * i + j for i in range(num_threads) for j in range(per_thread)]
    assert sorted(ended) == expected
    assert_idle(scheduler)


def test_planning_releases_the_interpreter() -> None:
    scheduler = make(max_model_len=300_000, num_pages=75_000, max_num_batched_tokens=300_000)
    scheduler.submit(1, np.ones(250_000, np.int32))
    stop, counted = threading.Event(), [0]

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.2)  # between two lines of this thread nobody else runs, unless a call lets go
    thread = threading.Thread(target=count)
    try:
        thread.start()
        before = counted[0]
        step = scheduler.plan(0, None)
        after = counted[0]
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert step is not None
    assert after > before


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_a_dropped_scheduler_ends_its_planner_thread() -> None:
    def num_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    gc.collect()  # engines of earlier tests end their threads now, not between the counts
    before = num_threads()
    scheduler = make()
    scheduler.submit(1, ids(1))
    scheduler.start_plan(0, None)
    assert num_threads() == before + 1
    del scheduler
    assert num_threads() == before
