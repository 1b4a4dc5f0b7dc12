"""What a fit trains, behind one interface: a head or a draft model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import nn

from sonar_engine.models.model_config import ModelConfig
from sonar_engine.tokenizer import Tokenizer
from sonar_engine.training.config import FitConfig
from sonar_engine.training.loss import DraftOutcome
from sonar_engine.training.packing import PackedBatch
from sonar_engine.training.shards import CapturedTexts


class StudentTrainer(nn.Module):
    """A student with what it is trained against: one forward pass is one batch.

    The parameters are those of its one child; the target's matrices are constants. `num_steps` are the draft steps
    that an outcome tells of.
    """

    num_steps: int

    def forward(self, batch: PackedBatch, num_texts: int) -> tuple[torch.Tensor, DraftOutcome]:
        """The loss, in nats a token, averaged over `num_texts` texts (those of all ranks), and its parts."""
        raise NotImplementedError


@dataclass(frozen=True)
class Lesson:
    """What a student is made for: the target in `path`, and the texts `indices` that it will be trained on."""

    config: FitConfig
    path: Path
    target: ModelConfig
    tokenizer: Tokenizer
    texts: CapturedTexts
    indices: list[int]
    compute: torch.dtype
    device: torch.device


class Student(Protocol):
    """A head or a draft model while it is trained; the parameters themselves are the trainer's."""

    @property
    def trainer(self) -> StudentTrainer: ...

    @property
    def facts(self) -> Mapping[str, Any]:  # beside those on the data, for the configuration that is exported
        ...

    @classmethod
    def start(cls, lesson: Lesson) -> Self:
        """In fp32, on the lesson's device. Raises a SonarError for what cannot be begun with."""
        ...

    def describe(self) -> str:
        """For people, in one line."""
        ...

    def export(self, folder: Path, parameters: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """A folder that serves. `parameters` are the trained ones, whole, on the CPU, without the child's name."""
        ...
