"""The orders in which the stages of a step come: what the host queues for the device between plan and commit.

    commit step n - 1 -> plan step n -> one of these -> the caller handles the events of step n - 1 -> commit step n ...

On a device that runs alone nothing here waits for it. The host waits once a step, in `commit`, for the verdict; so it
commits and plans while the device runs whatever was queued behind verification. On a CPU each call does its work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from sonar_engine.schedules.stages import Machine, StepInFlight, fetch, ingest, load, propose, verify

ScheduleName = Literal["plain", "draft_target", "mtp"]
Schedule = Callable[[Machine, int], StepInFlight]  # of a step's id


def plain(machine: Machine, step_id: int) -> StepInFlight:
    """For drafters that learn nothing from verification: nothing runs on the device while the host commits and plans.

    Lookups in the text so far need the verdict before they can propose, so there is nothing to plan earlier either.
    """
    batch = load(machine, step_id)
    draft = propose(machine, batch)
    verified = verify(machine, batch, draft)
    step = fetch(machine, batch, verified)
    machine.device.end_step()
    return step


def draft_target(machine: Machine, step_id: int) -> StepInFlight:
    """For drafters that run over what the target saw. That run hides the commit and the planning of the next batch.

    The first draft comes from carried logits, so the draft's run starts as soon as the batch is planned; what the host
    prepares for the target's pass, it prepares while the draft runs.
    """
    batch = load(machine, step_id)
    draft = propose(machine, batch)
    verified = verify(machine, batch, draft)
    step = fetch(machine, batch, verified)
    ingest(machine, step, verified.hidden)
    machine.device.end_step()
    return step


def mtp(machine: Machine, step_id: int) -> StepInFlight:
    """The same stages as `draft_target`; what differs lies in the drafter's calls.

    A head's `ingest` is a kernel that shifts the input one to the left, then a run with the target's own batch
    metadata, rejected tokens included: it needs no lengths, so none have to reach the host first.
    """
    return draft_target(machine, step_id)


SCHEDULES: dict[ScheduleName, Schedule] = {"plain": plain, "draft_target": draft_target, "mtp": mtp}
