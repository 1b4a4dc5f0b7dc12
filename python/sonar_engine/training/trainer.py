"""A head with what it is trained against, as one module: one forward pass is one batch, all draft steps of it."""

from __future__ import annotations

from pathlib import Path

import torch

from sonar_engine.drafters.mtp_head import MtpHead
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.weights import load_embedding, load_output_rows
from sonar_engine.training.loss import DraftOutcome, OutputRows, draft_loss, feature_loss, step_weights
from sonar_engine.training.packing import PackedBatch
from sonar_engine.training.recursion import run_recursion
from sonar_engine.training.student import StudentTrainer


class HeadTrainer(StudentTrainer):
    """The head's parameters are the only ones; the target's matrices are constants in the compute dtype."""

    def __init__(
        self,
        head: MtpHead,
        embedding: torch.Tensor,
        output: OutputRows,
        *,
        num_steps: int,
        step_decay: float,
        feature_weight: float = 0.0,
        compute: torch.dtype = torch.float32,
    ) -> None:
        """`embedding` [V, H] as served."""
        super().__init__()
        self.head = head
        self._constants = embedding, output
        self.num_steps = num_steps
        self.step_decay = step_decay
        self.feature_weight = feature_weight
        self.compute = compute

    def forward(self, batch: PackedBatch, num_texts: int) -> tuple[torch.Tensor, DraftOutcome]:
        embedding, output = self._constants
        states, features = run_recursion(self.head, embedding, batch, self.num_steps, self.compute)
        weights = step_weights(batch, self.num_steps, self.step_decay, num_texts)
        loss, outcome = draft_loss(states, batch, output, weights)
        if self.feature_weight:
            loss = loss + self.feature_weight * feature_loss(features, batch, weights)
        return loss, outcome


def load_constants(
    path: Path,
    target: ModelConfig,
    token_map: torch.Tensor | None,
    *,
    served: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
    whole: bool = False,
) -> tuple[torch.Tensor, OutputRows]:
    """The target's embedding and output rows, rounded to `served` as the engine has them; `whole`: all rows too."""
    embedding = load_embedding(path, target, served, device)
    every = torch.arange(target.vocab_size)
    ids = every if token_map is None else token_map.cpu()
    rows = load_output_rows(path, target, ids, served, device).to(compute)
    matrix = load_output_rows(path, target, every, served, device).to(compute) if whole else None
    return embedding, OutputRows(rows, None if token_map is None else token_map.to(device), matrix)
