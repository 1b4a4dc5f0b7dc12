"""The reduced draft vocabulary: the ids that answers are made of most often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sonar_engine.training.shards import CapturedTexts


@dataclass(frozen=True)
class DraftVocabulary:
    """`token_map` int64 [W], ascending target ids; `coverage` is the share of answer tokens among them, 0..1."""

    token_map: torch.Tensor
    coverage: float


def count_answer_tokens(texts: CapturedTexts, indices: Sequence[int]) -> torch.Tensor:
    """int64 [V]: how often each id is in the answers, which is where the loss is."""
    counts = torch.zeros(texts.target.vocab_size, dtype=torch.int64)
    for index in indices:
        answer = texts.tokens(index)[texts.prompt_lens[index] :]
        counts += torch.bincount(answer.long(), minlength=len(counts))
    return counts


def choose_vocabulary(counts: torch.Tensor, size: int) -> DraftVocabulary:
    """The `size` most frequent ids, lower ones first among equals."""
    order = torch.argsort(counts, descending=True, stable=True)
    token_map = order[: min(size, len(order))].sort().values
    return DraftVocabulary(token_map, coverage_of(counts, token_map))


def coverage_of(counts: torch.Tensor, token_map: torch.Tensor | None) -> float:
    total = int(counts.sum())
    return 1.0 if token_map is None or total == 0 else int(counts[token_map].sum()) / total
