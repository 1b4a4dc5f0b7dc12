"""A draft model as a student."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sonar_engine.tokenizer import Tokenizer
from sonar_engine.training.draft_folder import TrainedDraft, export_draft
from sonar_engine.training.draft_start import chosen_layers, layers_of_draft, read_layers
from sonar_engine.training.draft_trainer import DraftTrainer
from sonar_engine.training.identity import TargetIdentity
from sonar_engine.training.student import Lesson
from sonar_engine.training.trainer import load_constants


@dataclass(frozen=True)
class DraftStudent:
    """`facts["layers"]` are the target's layers that it began with, none where it began as another draft."""

    trainer: DraftTrainer
    tokenizer: Tokenizer
    facts: Mapping[str, Any]
    of: TargetIdentity
    num_target_layers: int

    @classmethod
    def start(cls, lesson: Lesson) -> DraftStudent:
        config, target, texts = lesson.config, lesson.target, lesson.texts
        chosen: tuple[int, ...] = ()
        if config.init_from is not None:
            layers = layers_of_draft(config.init_from, texts.target, config.row_tokens)
        else:
            chosen = chosen_layers(config.layers, config.num_layers, target)
            layers = read_layers(lesson.path, target, chosen, config.row_tokens)
        embedding, output = load_constants(
            lesson.path, target, None, served=texts.dtype, compute=lesson.compute, device=lesson.device
        )
        trainer = DraftTrainer(
            layers.to(lesson.device), embedding, output, num_steps=config.num_steps, compute=lesson.compute
        )
        facts = {"layers": list(chosen), "num_steps": config.num_steps}
        return cls(trainer, lesson.tokenizer, facts, texts.target, target.num_layers)

    def describe(self) -> str:
        config = self.trainer.layers.config
        trained = sum(parameter.numel() for parameter in self.trainer.parameters())
        frozen = self.trainer.constants[0].numel() * (1 if config.tie_word_embeddings else 2)
        which = f" ({', '.join(map(str, self.facts['layers']))})" if self.facts["layers"] else ""
        return (
            f"draft model: {config.num_layers} layers of {self.num_target_layers}{which}, "
            f"{trained:,} parameters of {trained + frozen:,} are trained"
        )

    def export(self, folder: Path, parameters: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        embedding, output = self.trainer.constants
        config = self.trainer.layers.config
        draft = TrainedDraft(config, parameters, embedding, output.rows, self.tokenizer)
        export_draft(folder, draft, self.of, facts)
