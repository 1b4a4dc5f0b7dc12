"""Acceptance length from a known text: where the engine would begin drafts, and how many it would accept.

The engine begins its next draft behind what it has accepted, so a text is walked: i += run + 1. Averaging over all
positions instead reads several per cent high, since long runs are begun from more positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sonar_engine.training.packing import PackedBatch


@dataclass
class Walked:
    """Drafts of one or more texts. `accepted[j]` counts those that accepted exactly j tokens."""

    accepted: np.ndarray  # int64 [K + 1]

    @classmethod
    def none(cls, num_steps: int) -> Walked:
        return cls(np.zeros(num_steps + 1, np.int64))

    def add(self, other: Walked) -> None:
        self.accepted = self.accepted + other.accepted

    @property
    def num_drafts(self) -> int:
        return int(self.accepted.sum())

    @property
    def acceptance_length(self) -> float:
        """Tokens a pass of the target, the bonus token included."""
        return 1 + float(self.accepted @ np.arange(len(self.accepted))) / max(self.num_drafts, 1)

    @property
    def reached(self) -> np.ndarray:
        """Share of drafts that accepted at least j tokens, j = 1..K: acceptance by position, unconditional."""
        at_least = self.accepted[::-1].cumsum()[::-1]
        share: np.ndarray = at_least[1:] / max(self.num_drafts, 1)
        return share

    @property
    def conditional(self) -> np.ndarray:
        """Acceptance by position among drafts that accepted all tokens before it."""
        at_least = self.accepted[::-1].cumsum()[::-1]
        share: np.ndarray = at_least[1:] / np.maximum(at_least[:-1], 1)
        return share


def walk(runs: Sequence[int], num_steps: int) -> Walked:
    """`runs[s]`: tokens that the draft from start slot s has right in a row, at most `num_steps`."""
    accepted = np.zeros(num_steps + 1, np.int64)
    at = 0
    while at < len(runs):
        accepted[runs[at]] += 1
        at += runs[at] + 1
    return Walked(accepted)


def walk_batch(batch: PackedBatch, drafts: torch.Tensor) -> Walked:
    """All texts of a batch; drafts int64 [K, B, M] as in `DraftOutcome`, right where they are the text's own tokens."""
    runs = right_in_a_row(batch, drafts).cpu()
    ids = batch.text_ids.cpu()
    total = Walked.none(len(drafts))
    for row in range(len(ids)):
        texts = ids[row]
        for index in texts[texts >= 0].unique().tolist():
            total.add(walk(runs[row][texts == index].tolist(), len(drafts)))
    return total


def right_in_a_row(batch: PackedBatch, drafts: torch.Tensor) -> torch.Tensor:
    """int64 [B, M]"""
    num_steps, length = len(drafts), batch.tokens.shape[1]
    right = []
    for step in range(num_steps):
        at = batch.slots + step + 2
        tokens = batch.tokens.gather(1, at.clamp(max=length - 1))
        right.append((tokens == drafts[step]) & (at <= batch.lasts))
    return torch.stack(right).long().cumprod(0).sum(0)
