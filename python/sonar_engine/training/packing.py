"""Texts side by side in rows of equal length, each seeing only itself, and the order of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sonar_engine.training.identity import TargetIdentity

_OPEN_ROWS = 64  # rows that a text is tried in before a new one is begun

Row = list[int]  # indices of texts


class TextStates(Protocol):
    """Texts and the target's states over them, by index; `CapturedTexts` has them on disk."""

    @property
    def target(self) -> TargetIdentity: ...

    @property
    def dtype(self) -> torch.dtype:  # of the states
        ...

    @property
    def prompt_lens(self) -> list[int]: ...

    def __len__(self) -> int: ...

    def length(self, index: int) -> int: ...

    def tokens(self, index: int) -> torch.Tensor:  # int32 [T]
        ...

    def hidden(self, index: int) -> torch.Tensor:  # [T, H]
        ...


@dataclass(frozen=True)
class PackedBatch:
    """B rows of L positions, M start slots a row. A start slot s is where a draft begins: the head has the target's
    state at s and the token at s + 1, and its draft token k (from 1) is the one at s + k + 1.

    Slots are the positions from a text's last prompt token to its third last token: in serving no draft begins earlier.
    """

    tokens: torch.Tensor  # int64 [B, L]
    hidden: torch.Tensor  # [B, L, H], the target's
    text_starts: torch.Tensor  # int64 [B, L], where in the row the position's own text begins; itself in padding
    slots: torch.Tensor  # int64 [B, M], padded with 0
    lasts: torch.Tensor  # int64 [B, M], the last token of the slot's text; -1 in padding
    weights: torch.Tensor  # fp32 [B, M], 1 / start slots of the slot's text; 0 in padding
    text_ids: torch.Tensor  # int64 [B, M], index of the slot's text; -1 in padding

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(**{name: value.to(device) for name, value in vars(self).items()})


def pack_rows(lengths: Sequence[int], order: Sequence[int], row_tokens: int) -> list[Row]:
    """First fit, in `order`; `lengths[i]` of text i, longer ones count as cut to `row_tokens`."""
    rows: list[Row] = []
    room: dict[int, int] = {}  # open row -> tokens left
    for index in order:
        length = min(lengths[index], row_tokens)
        row = next((row for row, left in room.items() if left >= length), None)
        if row is None:
            rows.append([])
            row = len(rows) - 1
            room[row] = row_tokens
            if len(room) > _OPEN_ROWS:
                del room[min(room, key=lambda candidate: room[candidate])]
        rows[row].append(index)
        if row in room:
            room[row] -= length
    return rows


def epoch_rows(lengths: Sequence[int], indices: Sequence[int], row_tokens: int, seed: int, epoch: int) -> list[Row]:
    """The rows of an epoch, in random order; a function of the arguments alone."""
    generator = np.random.default_rng((seed, epoch))
    rows = pack_rows(lengths, generator.permutation(np.asarray(indices)).tolist(), row_tokens)
    return [rows[index] for index in generator.permutation(len(rows))]


def batches_of(rows: list[Row], batch_rows: int) -> Iterator[list[Row]]:
    """Whole batches; rows left over are of this epoch's random tail and are dropped, unless there are no others."""
    whole = max(1, len(rows) // batch_rows)
    for number in range(whole):
        yield rows[number * batch_rows : (number + 1) * batch_rows]


def count_texts(texts: TextStates, rows: list[Row], row_tokens: int) -> int:
    """Texts with at least one start slot."""
    return sum(len(_slot_range(texts, index, row_tokens)) > 0 for row in rows for index in row)


def _slot_range(texts: TextStates, index: int, row_tokens: int) -> range:
    """A text's start slots, in its own positions."""
    return range(max(texts.prompt_lens[index] - 1, 0), min(texts.length(index), row_tokens) - 2)


def build_batch(texts: TextStates, rows: list[Row], row_tokens: int) -> PackedBatch:
    """The texts of `rows`, at least one row; a row without texts is padding."""
    parts = [_build_row(texts, row, row_tokens) for row in rows]
    most = max(1, *(len(part["slots"]) for part in parts))
    for part in parts:
        for name, padding in (("slots", 0), ("lasts", -1), ("weights", 0), ("text_ids", -1)):
            missing = most - len(part[name])
            part[name] = torch.cat((part[name], part[name].new_full((missing,), padding)))
    return PackedBatch(**{name: torch.stack([part[name] for part in parts]) for name in parts[0]})


def _build_row(texts: TextStates, row: Row, row_tokens: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(row_tokens, dtype=torch.int64)
    hidden = torch.zeros((row_tokens, texts.target.hidden_size), dtype=texts.dtype)
    text_starts = torch.arange(row_tokens)
    slots, lasts, weights, text_ids = [], [], [], []
    at = 0
    for index in row:
        length = min(texts.length(index), row_tokens)
        tokens[at : at + length] = texts.tokens(index)[:length]
        hidden[at : at + length] = texts.hidden(index)[:length]
        text_starts[at : at + length] = at
        starts = _slot_range(texts, index, row_tokens)
        if len(starts) > 0:
            slots.append(at + torch.arange(starts.start, starts.stop))
            lasts.append(torch.full((len(starts),), at + length - 1))
            weights.append(torch.full((len(starts),), 1 / len(starts)))
            text_ids.append(torch.full((len(starts),), index))
        at += length
    empty = torch.zeros(0, dtype=torch.int64)
    return {
        "tokens": tokens,
        "hidden": hidden,
        "text_starts": text_starts,
        "slots": torch.cat([empty, *slots]),
        "lasts": torch.cat([empty, *lasts]),
        "weights": torch.cat([empty.float(), *weights]),
        "text_ids": torch.cat([empty, *text_ids]),
    }
