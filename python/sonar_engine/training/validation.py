"""Loss and acceptance on texts kept out of training, by walking them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sonar_engine.training.packing import Row, TextStates, build_batch, count_texts, pack_rows
from sonar_engine.training.ranks import Ranks
from sonar_engine.training.shards import CapturedTexts
from sonar_engine.training.student import StudentTrainer
from sonar_engine.training.walk import Walked, walk_batch

_SALT = 2654435761  # a hash of a text's tokens decides, so that a text stays on its side when others are added


@dataclass(frozen=True)
class Split:
    """Indices of texts."""

    training: list[int]
    validation: list[int]


def split_texts(texts: CapturedTexts, share: float) -> Split:
    """By each text's own tokens: the same text is always on the same side."""
    training: list[int] = []
    validation: list[int] = []
    for index in range(len(texts)):
        tokens = texts.tokens(index).numpy().astype(np.uint64)
        mixed = int((tokens * np.arange(1, 2 * len(tokens), 2, dtype=np.uint64) * np.uint64(_SALT)).sum())
        (validation if mixed % 10_007 < share * 10_007 else training).append(index)
    return Split(training, validation)


@dataclass(frozen=True)
class Validation:
    """`loss` in nats, as in training; the others by draft step. `agreement`: share of start slots whose draft is the
    target's own first choice; `overlap` as in `DraftOutcome`; `walked` by the texts' own tokens."""

    loss: float
    agreement: list[float]
    overlap: list[float]
    walked: Walked

    def to_dict(self) -> dict[str, Any]:
        return {
            "loss": self.loss,
            "agreement": self.agreement,
            "overlap": self.overlap,
            "acceptance_length": self.walked.acceptance_length,
            "conditional": self.walked.conditional.tolist(),
            "reached": self.walked.reached.tolist(),
        }


def validation_rows(texts: TextStates, indices: Sequence[int], row_tokens: int, most: int) -> list[Row]:
    lengths = [texts.length(index) for index in range(len(texts))]
    return pack_rows(lengths, indices, row_tokens)[:most]


@torch.no_grad()
def validate(trainer: StudentTrainer, texts: TextStates, rows: list[Row], row_tokens: int, ranks: Ranks) -> Validation:
    """Every rank must call it, with the same rows."""
    num_steps = trainer.num_steps
    sums = torch.zeros(3 * num_steps + 1, dtype=torch.float64)
    walked = Walked.none(num_steps)
    num_texts = count_texts(texts, rows, row_tokens)
    per_rank = -(-len(rows) // ranks.size)
    for number in range(per_rank):
        at = number * ranks.size + ranks.rank
        batch = build_batch(texts, [rows[at] if at < len(rows) else []], row_tokens).to(ranks.device)
        loss, outcome = trainer(batch, num_texts)
        right = (outcome.drafts == outcome.targets) & outcome.valid
        parts = [loss[None], right.sum((1, 2)), outcome.overlap.sum((1, 2)), outcome.valid.sum((1, 2))]
        sums += torch.cat([part.double().cpu() for part in parts])
        walked.add(walk_batch(batch, outcome.drafts))
    counts = torch.from_numpy(walked.accepted.astype(np.float64))
    total = ranks.total(torch.cat((sums, counts)).to(ranks.device)).cpu()
    loss_sum, agreed, overlap, slots, accepted = total.split([1, num_steps, num_steps, num_steps, num_steps + 1])
    share = 1 / slots.clamp(min=1)
    return Validation(
        float(loss_sum), (agreed * share).tolist(), (overlap * share).tolist(), Walked(accepted.long().numpy())
    )
