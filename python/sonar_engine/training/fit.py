"""`sonar train fit`: a head or a draft model from captured states. A killed run goes on from its last state as if never
stopped.

`out` holds `log.jsonl` (a line a step, a line a validation), `state.safetensors` to go on from, and `head` or `draft`,
the folder that serves, as of the last state.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sonar_engine.engine import Progress
from sonar_engine.errors import ConfigError, DivergedError, TrainingError
from sonar_engine.files import sha256_of_bytes
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.registry import resolve_model
from sonar_engine.tokenizer import load_tokenizer
from sonar_engine.training.config import FitConfig
from sonar_engine.training.draft_student import DraftStudent
from sonar_engine.training.export_note import earlier_runs
from sonar_engine.training.fit_log import FitLog
from sonar_engine.training.head_student import HeadStudent
from sonar_engine.training.identity import TargetIdentity
from sonar_engine.training.packing import Row, build_batch, count_texts
from sonar_engine.training.ranks import Ranks, join_ranks
from sonar_engine.training.schedule import FitSchedule, PlannedStep
from sonar_engine.training.shards import CapturedTexts
from sonar_engine.training.student import Lesson, Student, StudentTrainer
from sonar_engine.training.training_state import STATE, load_state, read_facts, save_state, whole
from sonar_engine.training.validation import split_texts, validate, validation_rows

Say = Callable[[str], None]
_STUDENTS: dict[str, type[Student]] = {"head": HeadStudent, "draft": DraftStudent}
_BETAS = (0.9, 0.95)  # AdamW's
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def fit_drafter(config: FitConfig, progress: Progress, say: Say) -> Path:
    """Trains to the end and returns the folder that serves. Raises a SonarError for what cannot be used or written."""
    device = _device(config)
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        ranks = stack.enter_context(join_ranks(device))
        run = _FitRun.build(config, ranks, say if ranks.is_first else _silent)
        log = stack.enter_context(FitLog(config, ranks.is_first, run.done))
        run.train(log, progress if ranks.is_first else _no_progress)
    return config.exported


@dataclass
class _FitRun:
    """One run on one rank. `done` steps lie behind it."""

    config: FitConfig
    ranks: Ranks
    texts: CapturedTexts
    schedule: FitSchedule
    validation: list[Row]
    student: Student
    trainer: StudentTrainer
    optimiser: torch.optim.Optimizer
    facts: dict[str, Any]  # about student and data, for what is exported
    settings: str  # a digest
    done: int

    @classmethod
    def build(cls, config: FitConfig, ranks: Ranks, say: Say) -> _FitRun:
        resolved = resolve_model(config.model)
        texts = CapturedTexts(config.captures)
        tokenizer = load_tokenizer(resolved)
        TargetIdentity.of(resolved, tokenizer).check(texts.target, str(config.captures[0]))
        split = split_texts(texts, config.validation_share)
        lengths = [texts.length(index) for index in range(len(texts))]
        student = _STUDENTS[config.kind].start(
            Lesson(
                config=config,
                path=resolved.path,
                target=ModelConfig.load(resolved.path),
                tokenizer=tokenizer,
                texts=texts,
                indices=split.training,
                compute=_compute_dtype(config, ranks.device),
                device=ranks.device,
            )
        )
        ranks.shard(student.trainer)
        run = cls(
            config=config,
            ranks=ranks,
            texts=texts,
            schedule=FitSchedule(config, lengths, split.training),
            validation=validation_rows(texts, split.validation, config.row_tokens, config.validation_rows),
            student=student,
            trainer=student.trainer,
            optimiser=_optimiser(config, student.trainer),
            facts={**_facts(config, texts, split.training), **student.facts},
            settings=_settings_digest(config, texts),
            done=0,
        )
        run._resume()
        run._describe(say)
        return run

    def _resume(self) -> None:
        path = self.config.out / STATE
        facts = read_facts(path)
        if facts is None:
            return
        if facts.get("settings") != self.settings:
            raise TrainingError(
                f"{self.config.out} holds a run with other settings or data; give the same ones, or another folder "
                f"(to go on from its {self.config.kind}, add --init-from {self.config.exported})"
            )
        self.done = int(facts["step"])
        load_state(path, self.trainer, self.optimiser, self.done)

    def _describe(self, say: Say) -> None:
        facts = self.facts
        say(
            f"{facts['num_texts']:,} texts, {facts['num_tokens']:,} tokens; {self.schedule.num_steps:,} steps"
            + (f", {self.done:,} of them done" if self.done else "")
        )
        say(self.student.describe())

    def train(self, log: FitLog, progress: Progress) -> None:
        total = self.schedule.num_steps
        for planned in self.schedule.steps(self.done):
            log.write(self._step(planned))
            self.done = planned.step
            if self.done % self.config.save_every == 0 or self.done == total:
                self._save(log)
            progress("Training", self.done, total)
        if not self.config.exported.exists():  # removed since the last save
            self._export()

    def _step(self, planned: PlannedStep) -> dict[str, Any]:
        """One optimiser step; what the log says of it."""
        started = time.perf_counter()
        config, ranks, texts = self.config, self.ranks, self.texts
        rate = self.schedule.rate(planned.step)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        num_texts = count_texts(texts, planned.rows, config.row_tokens)
        mine = planned.rows[ranks.rank :: ranks.size] or [[]]
        batch = build_batch(texts, mine, config.row_tokens).to(ranks.device)
        loss, outcome = self.trainer(batch, num_texts)
        (loss * ranks.size).backward()  # the ranks' gradients are averaged
        length = torch.nn.utils.clip_grad_norm_(self.trainer.parameters(), config.clip)
        right = ((outcome.drafts == outcome.targets) & outcome.valid).sum((1, 2))
        figures = torch.cat([loss.detach()[None], right, outcome.overlap.sum((1, 2)), outcome.valid.sum((1, 2))])
        figures = ranks.total(figures.double()).cpu()
        k = self.trainer.num_steps
        total, agreed, overlap, slots = figures.split([1, k, k, k])
        if not math.isfinite(float(total)) or not math.isfinite(float(whole(length))):
            raise DivergedError(
                f"the loss of step {planned.step} is {float(total)}, its gradient {float(whole(length))}; the state of "
                f"the last save is unharmed: lower learning_rate (now {rate:g}) or clip, and begin in another folder"
            )
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return {
            "step": planned.step,
            "epoch": planned.epoch,
            "tokens": sum(min(texts.length(index), config.row_tokens) for row in planned.rows for index in row),
            "loss": float(total),
            "agreement": (agreed / slots.clamp(min=1)).tolist(),
            "overlap": (overlap / slots.clamp(min=1)).tolist(),
            "rate": rate,
            "gradient": float(whole(length)),
            "seconds": time.perf_counter() - started,
        }

    def _save(self, log: FitLog) -> None:
        """Validation, then the export, then the state: a run that is killed in between does them again."""
        if self.validation:
            found = validate(self.trainer, self.texts, self.validation, self.config.row_tokens, self.ranks)
            self.ranks.gather_no_more(self.trainer)
            log.write({"step": self.done, "validation": found.to_dict()})
        self._export()
        facts = {"step": str(self.done), "settings": self.settings}
        save_state(self.config.out / STATE, self.trainer, self.optimiser, facts)
        self.ranks.wait()

    def _export(self) -> None:
        parameters = {
            name.split(".", 1)[1]: whole(parameter.detach()).cpu().contiguous()
            for name, parameter in self.trainer.named_parameters()
        }
        if self.ranks.is_first:
            self.student.export(self.config.exported, parameters, {**self.facts, "steps": self.done})


def _optimiser(config: FitConfig, trainer: StudentTrainer) -> torch.optim.Optimizer:
    """AdamW; norms and biases do not decay."""
    matrices = [parameter for parameter in trainer.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in trainer.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=_BETAS)


def _facts(config: FitConfig, texts: CapturedTexts, training: list[int]) -> dict[str, Any]:
    """What `write_note` asks for, but the steps."""
    settings = {name: value for name, value in config.settings().items() if name != "init_from"}
    return {
        "settings": settings,
        "earlier": earlier_runs(config.init_from, "sonar train fit"),
        "num_texts": len(training),
        "num_tokens": sum(texts.length(index) for index in training),
        "sources": texts.texts_by_source,  # of the validation's texts too
    }


def _settings_digest(config: FitConfig, texts: CapturedTexts) -> str:
    """Of whatever the result is a function of."""
    return sha256_of_bytes(json.dumps([config.settings(), texts.digest], sort_keys=True).encode())


def _device(config: FitConfig) -> str:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no CUDA device; use device=cpu or auto")
    return config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _compute_dtype(config: FitConfig, device: torch.device) -> torch.dtype:
    if config.compute == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[config.compute]


def _silent(line: str) -> None:
    """Other ranks say nothing."""


def _no_progress(what: str, done: int, total: int) -> None:
    """Other ranks show nothing."""
