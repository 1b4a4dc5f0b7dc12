"""An MTP head as a student."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sonar_engine.drafters.mtp_config import MtpConfig
from sonar_engine.training.head_folder import TrainedHead, export_head
from sonar_engine.training.head_start import start_head
from sonar_engine.training.identity import TargetIdentity
from sonar_engine.training.student import Lesson
from sonar_engine.training.trainer import HeadTrainer, load_constants
from sonar_engine.training.vocabulary import count_answer_tokens, coverage_of


@dataclass(frozen=True)
class HeadStudent:
    """`token_map` int64 [W], None: all ids."""

    trainer: HeadTrainer
    token_map: torch.Tensor | None
    facts: Mapping[str, Any]
    of: TargetIdentity

    @classmethod
    def start(cls, lesson: Lesson) -> HeadStudent:
        config, texts = lesson.config, lesson.texts
        head, token_map = start_head(config, lesson.target, lesson.path, texts, lesson.indices)
        embedding, output = load_constants(
            lesson.path, lesson.target, token_map, served=texts.dtype, compute=lesson.compute, device=lesson.device
        )
        trainer = HeadTrainer(
            head.to(lesson.device),
            embedding,
            output,
            num_steps=config.num_steps,
            step_decay=config.step_decay,
            feature_weight=config.feature_loss,
            compute=lesson.compute,
        )
        coverage = coverage_of(count_answer_tokens(texts, lesson.indices), token_map)
        return cls(trainer, token_map, {"coverage": coverage, "num_steps": config.num_steps}, texts.target)

    @property
    def _config(self) -> MtpConfig:
        return self.trainer.head.config

    def describe(self) -> str:
        coverage = self.facts["coverage"]
        return f"draft vocabulary: {self._config.num_draft_ids:,} ids, {coverage:.2%} of the answers' tokens"

    def export(self, folder: Path, parameters: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        export_head(folder, TrainedHead(self._config, parameters, self.token_map), self.of, facts)
