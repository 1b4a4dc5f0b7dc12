"""The loop that drafts a chain: a token a row and pass, the first one from logits that the last step left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sonar_engine.device import to_device
from sonar_engine.drafters.base import Draft
from sonar_engine.drafters.draft_sampler import DraftSampler
from sonar_engine.step_buffers import BatchMetadata


@dataclass(frozen=True)
class ActiveRows:
    """Decode rows that take a draft number `step` (from 1 here). int64 [N] on the host, `index` also on the device."""

    step: int
    index: torch.Tensor  # of the decode rows
    slots: np.ndarray
    known: np.ndarray  # tokens of each sequence that are no drafts


Advance = Callable[[ActiveRows, torch.Tensor], torch.Tensor]
"""(rows, their last drafts int32 [N]) -> the logits of their next ones, fp32 [N, W]: one pass of the drafter."""


def draft_chain(
    batch: BatchMetadata,
    sampler: DraftSampler,
    carried: torch.Tensor,
    advance: Advance,
    token_map: torch.Tensor | None = None,
) -> Draft:
    """Drafts for every decode row as many tokens as the plan granted it; `batch` has drafts.

    carried fp32 [max_num_seqs, W]: the logits of each slot's first draft. `token_map` as in `Draft`.
    """
    num_decode, most, device = batch.num_decode_reqs, batch.max_draft_tokens, carried.device
    lens = batch.host["num_draft_tokens"][:num_decode]
    slots = batch.host["slots"][:num_decode].astype(np.int64)
    known = (batch.host["kv_len"][:num_decode] - lens).astype(np.int64)
    output_pos = batch.host["output_pos"][:num_decode]
    tokens = torch.zeros((num_decode, most), dtype=torch.int32, device=device)
    probs = None
    if sampler.draws(slots[lens > 0]):
        probs = torch.empty((num_decode, most, carried.shape[1]), dtype=torch.float32, device=device)
    for step in range(most):
        active = np.flatnonzero(lens > step)
        index = to_device(active, device)
        rows = ActiveRows(step, index, slots[active], known[active])
        logits = carried[to_device(rows.slots, device)] if step == 0 else advance(rows, tokens[index, step - 1])
        tokens[index, step] = sampler.choose(logits, rows.slots, output_pos[active], step)
        if probs is not None:
            probs[index, step] = sampler.probs(logits, rows.slots)
    return Draft(tokens, probs, token_map)
