"""Plans steps: at once, or ahead on the scheduler's own thread while the host does something else."""

from __future__ import annotations

from sonar_engine._scheduler import Scheduler
from sonar_engine.drafters.base import Drafter
from sonar_engine.step_buffers import StepBuffers


class StepPlanner:
    """One plan at a time, each with what the drafter can take by then."""

    def __init__(self, scheduler: Scheduler, buffers: StepBuffers, drafter: Drafter, *, ahead: bool) -> None:
        self._scheduler = scheduler
        self._buffers = buffers
        self._drafter = drafter
        self._ahead = ahead
        self._is_started = False

    def start(self) -> None:
        """The last step has been committed: plans the next one ahead, where that is asked for."""
        if self._ahead:
            self._scheduler.start_plan(self._buffers.next_slot, self._drafter.draft_lens())
            self._is_started = True

    def take(self) -> int | None:
        """The id of the step planned ahead, if there is one, else of one planned now; None: nothing can run."""
        step_id = None
        if self._is_started:
            self._is_started = False
            step_id = self._scheduler.take_plan()
        if step_id is None:
            step_id = self._scheduler.plan(self._buffers.next_slot, self._drafter.draft_lens())
        return step_id
