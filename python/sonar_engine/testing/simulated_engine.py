"""The engine with its own loop, scheduler, planner and drafters on a simulated device."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.drafters.draft_model import DraftModelDrafter
from sonar_engine.drafters.draft_sampler import DraftSampler
from sonar_engine.drafters.mtp import MtpDrafter
from sonar_engine.drafters.registry import DrafterContext, DrafterMethod
from sonar_engine.engine import Engine
from sonar_engine.schedules.orders import Schedule
from sonar_engine.schedules.planner import StepPlanner
from sonar_engine.schedules.stages import Machine
from sonar_engine.testing.byte_tokenizer import byte_tokenizer
from sonar_engine.testing.simulated_device import SimulatedDevice
from sonar_engine.testing.simulated_model import VOCAB_SIZE, no_attention, simulated_head, simulated_runner
from sonar_engine.types import EngineInfo

SimulatedSchedule = Literal["draft_target", "mtp"]


class SimulatedEngine(Engine):
    """Runs on `device`, with its tokens, in the order of `schedule`."""

    def __init__(
        self,
        device: SimulatedDevice,
        schedule: SimulatedSchedule,
        *,
        max_num_seqs: int,
        num_drafts: int,
        max_model_len: int = 1024,
        max_num_batched_tokens: int = 8192,
        planning_seconds: float = 0.0,
        wrong_every: int = 5,
        order: Schedule | None = None,
    ) -> None:
        """A plan takes `planning_seconds` at least; about one of `wrong_every` drafts is wrong (0: none).

        `order` replaces the order of the stages that goes with `schedule`.
        """
        self._simulated = device
        self._planning_seconds = planning_seconds
        method: Literal["draft_model", "mtp"] = "mtp" if schedule == "mtp" else "draft_model"
        config = EngineConfig(
            model="simulated",
            device="cpu",
            num_threads=1,
            max_num_seqs=max_num_seqs,
            max_waiting=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            speculative=SpeculativeConfig(method=method, model="simulated", num_speculative_tokens=num_drafts),
        )
        runner = simulated_runner(config, device)
        info = EngineInfo(
            model_name="simulated",
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[0],
            dtype="float32",
            device="simulated",
            num_pages=runner.num_pages,
            page_size=config.page_size,
            max_num_seqs=max_num_seqs,
            drafter=method,
            num_speculative_tokens=num_drafts,
            version="simulated",
        )
        super().__init__(
            config, runner, byte_tokenizer(), info, device=device, method=_method(schedule, device, wrong_every)
        )
        if order is not None:
            self._schedule = order

    def _build_machine(self) -> Machine:
        machine = super()._build_machine()
        return replace(machine, planner=TimedPlanner(machine, self._simulated, self._planning_seconds))


class TimedPlanner(StepPlanner):
    """Plans ahead on the scheduler's own thread, takes `seconds` at least for it, and tells the device of each step.

    The host waits for what is left of them as it waits for the thread, without the interpreter's lock.
    """

    def __init__(self, machine: Machine, device: SimulatedDevice, seconds: float) -> None:
        super().__init__(machine.scheduler, machine.buffers, machine.drafter, ahead=True)
        self._device = device
        self._seconds = seconds
        self._started_at: float | None = None

    def start(self) -> None:
        self._started_at = self._device.clock.now()
        super().start()

    def take(self) -> int | None:
        started_at, self._started_at = self._started_at, None
        step_id = super().take()
        if started_at is not None:
            self._device.wait_until("plan", started_at + self._seconds)
        if step_id is not None:
            self._device.enter_step(self._buffers.next_slot)
            if started_at is not None:
                self._device.add("planner", "plan", started_at, self._device.clock.now())
        return step_id


def _method(schedule: SimulatedSchedule, device: SimulatedDevice, wrong_every: int) -> DrafterMethod:
    def draft_model(context: DrafterContext) -> DraftModelDrafter:
        runner = simulated_runner(context.config, device, wrong_every, beside=context.runner)
        sampler = DraftSampler(context.sampling, runner.cpu_kernels)
        return DraftModelDrafter(runner, sampler, context.scheduler, context.config, VOCAB_SIZE, compacts=False)

    def mtp(context: DrafterContext) -> MtpDrafter:
        return MtpDrafter(
            simulated_head(device, wrong_every),
            context.runner,
            context.config,
            kv_cache=context.runner.kv_cache,
            attention=no_attention(),
            output=context.runner.model.output,
            sampler=DraftSampler(context.sampling, context.runner.cpu_kernels),
            compacts=False,
        )

    if schedule == "mtp":
        return DrafterMethod(mtp, schedule="mtp", needs_hidden="last")
    return DrafterMethod(draft_model, schedule="draft_target")
