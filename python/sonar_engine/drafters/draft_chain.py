"""The loop that drafts a chain: a token a row and pass, the first one from what the last step left."""

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
    """The decode rows that take a draft number `step` (from 0), int64 [N] each."""

    step: int
    index: torch.Tensor | slice  # of the decode rows, on the device
    device_slots: torch.Tensor  # int32 [N], `slots` there
    slots: np.ndarray
    known: np.ndarray  # tokens of each sequence that are no drafts


NextLogits = Callable[[ActiveRows, torch.Tensor | None], torch.Tensor]
"""(rows, their last drafts int32 [N]) -> the logits of their next ones, fp32 [N, W]: one pass of the drafter. In step 0
there are no last drafts, and no pass is needed."""


@dataclass(frozen=True)
class GivenDrafts:
    """Drafts of some decode rows that were chosen without chance, on the host. `own_ids` are `tokens` as ids of the
    draft's vocabulary, wherever the row's request needs probabilities."""

    is_given: np.ndarray  # bool [D]
    tokens: np.ndarray  # int32 [D, K]
    own_ids: np.ndarray  # int32 [D, K]


def draft_chain(
    batch: BatchMetadata,
    sampler: DraftSampler,
    next_logits: NextLogits,
    token_map: torch.Tensor | None = None,
    given: GivenDrafts | None = None,
) -> Draft:
    """Drafts for every decode row as many tokens as the plan granted it; `batch` has drafts.

    `token_map` as in `Draft`. Rows whose drafts are `given` run through no pass.
    """
    num_decode, most, device = batch.num_decode_reqs, batch.max_draft_tokens, batch.token_ids.device
    lens = batch.host["num_draft_tokens"][:num_decode]
    slots = batch.host["slots"][:num_decode].astype(np.int64)
    known = (batch.host["kv_len"][:num_decode] - lens).astype(np.int64)
    output_pos, device_slots = batch.host["output_pos"][:num_decode], batch.slots[:num_decode]
    if given is None:
        tokens = torch.zeros((num_decode, most), dtype=torch.int32, device=device)
    else:
        tokens = to_device(given.tokens[:, :most], device)
        lens = np.where(given.is_given, 0, lens)
    needs_probs, probs = sampler.draws(slots[lens > 0]).any(), None
    for step in range(lens.max(initial=0)):
        active = np.flatnonzero(lens > step)
        index = slice(None) if len(active) == num_decode else to_device(active, device)
        rows = ActiveRows(step, index, device_slots[index], slots[active], known[active])
        logits = next_logits(rows, None if step == 0 else tokens[index, step - 1])
        tokens[index, step] = sampler.choose(logits, rows.slots, output_pos[active], step)
        if needs_probs:
            if probs is None:
                probs = logits.new_empty((num_decode, most, logits.shape[1]))
            probs[index, step] = sampler.probs(logits, rows.slots)
    if given is not None and probs is not None:
        _put_one_hot(probs, given)
    return Draft(tokens, probs, token_map)


def _put_one_hot(probs: torch.Tensor, given: GivenDrafts) -> None:
    """Into the given rows of `probs` [D, K, W]."""
    rows = to_device(np.flatnonzero(given.is_given), probs.device)
    ids = to_device(given.own_ids[given.is_given, : probs.shape[1]].astype(np.int64), probs.device)
    probs[rows] = torch.zeros_like(probs[rows]).scatter_(2, ids[..., None], 1.0)
