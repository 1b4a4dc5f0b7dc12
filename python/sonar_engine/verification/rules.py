"""Which rule a batch's drafted requests go by, and what that rule reads of them.

| request | default | with `SpeculativeConfig.lossy` |
|---|---|---|
| temperature 0 | sample and match (exact tokens) | the same |
| seeded | sample and match (exact tokens) | typical acceptance: lossy |
| unseeded, drafts with probabilities | block or token verification (exact law) | typical acceptance: lossy |
| unseeded, drafts without | sample and match (exact law) | typical acceptance: lossy |
"""

from __future__ import annotations

import numpy as np
import torch
from sonar_kernels import DraftVocabulary, SampledRule, TypicalRule

from sonar_engine.config import LossyConfig
from sonar_engine.device import to_device
from sonar_engine.drafters.base import Draft
from sonar_engine.errors import ConfigError
from sonar_engine.sampling.coins import RECOVER, accept_coins
from sonar_engine.sampling.state import SAMPLED, SEEDED, SampleRows, SamplingState
from sonar_engine.step_buffers import BatchMetadata


def sampled_rule(
    logits: torch.Tensor,
    batch: BatchMetadata,
    draft: Draft,
    rows: SampleRows,
    state: SamplingState,
    *,
    vocabulary: DraftVocabulary | None,
    block: bool,
) -> SampledRule | None:
    """Block or token verification of the unseeded sampled requests, whose drafts have probabilities.

    logits fp32 [S, V], processed; None when the batch holds no such request with drafts.
    """
    requests = _drafted(batch, state, SAMPLED | SEEDED)
    if draft.probs is None or requests.size == 0:
        return None
    width = batch.max_draft_tokens
    index = to_device(requests, logits.device)
    first = batch.sample_indptr[index].long()  # sampled row of the first draft
    seeds, positions = rows.seeds.rows(first), rows.positions[first]
    recover = seeds.for_purpose(RECOVER)
    return SampledRule(
        requests=index.to(torch.int32),
        block=torch.full(index.shape, block, device=logits.device),
        target_probs=_target_probs(logits, rows, first, width),
        draft_probs=draft.probs[:, :width],
        accept_coins=accept_coins(seeds, positions, width),
        seed_lo=recover.lo,
        seed_hi=recover.hi,
        positions=positions,
        vocabulary=vocabulary,
    )


def lossy_rule(
    logits: torch.Tensor, batch: BatchMetadata, rows: SampleRows, state: SamplingState, config: LossyConfig
) -> TypicalRule | None:
    """Typical acceptance, lossy, of all requests above temperature 0; None when none of them has drafts."""
    requests = _drafted(batch, state, SAMPLED)
    if requests.size == 0:
        return None
    index = to_device(requests, logits.device)
    return TypicalRule(
        requests=index.to(torch.int32),
        target_probs=_target_probs(logits, rows, batch.sample_indptr[index].long(), batch.max_draft_tokens),
        posterior_threshold=config.posterior_threshold,
        posterior_alpha=config.posterior_alpha,
    )


def draft_vocabulary(token_map: torch.Tensor, vocab_size: int) -> DraftVocabulary:
    """`token_map` int [W], the target id of each draft id. Waits for the device, so build it once a map.

    Raises ConfigError where an id lies outside the target's vocabulary or comes up twice.
    """
    target_ids = token_map.to(torch.int32)
    if target_ids.numel() and (int(target_ids.min()) < 0 or int(target_ids.max()) >= vocab_size):
        raise ConfigError(
            f"the draft's token map leaves the target's vocabulary; every id must be in 0..{vocab_size - 1}"
        )
    own_ids = torch.arange(target_ids.shape[0], dtype=torch.int32, device=target_ids.device)
    draft_ids = torch.full((vocab_size,), -1, dtype=torch.int32, device=target_ids.device)
    draft_ids[target_ids.long()] = own_ids
    if not torch.equal(draft_ids[target_ids.long()], own_ids):
        raise ConfigError("the draft's token map names a target id twice; every draft id needs a target id of its own")
    return DraftVocabulary(target_ids, draft_ids)


def check_width(probs: torch.Tensor, vocabulary: DraftVocabulary | None, vocab_size: int) -> None:
    """Raises ConfigError where draft probabilities [D, K, W] do not fit the vocabulary they are over."""
    wanted = vocab_size if vocabulary is None else vocabulary.target_ids.shape[0]
    if probs.shape[2] != wanted:
        over = "the target's vocabulary" if vocabulary is None else "the draft's token map"
        raise ConfigError(f"draft probabilities are over {probs.shape[2]} ids, but {over} has {wanted}")


def _drafted(batch: BatchMetadata, state: SamplingState, bits: int) -> np.ndarray:
    """Decode rows with drafts, of requests that use SAMPLED but nothing else of `bits`; int64, ascending."""
    num_decode = batch.num_decode_reqs
    uses = state.uses[batch.host["slots"][:num_decode]]
    return np.flatnonzero(((uses & bits) == SAMPLED) & (batch.host["num_draft_tokens"][:num_decode] > 0))


def _target_probs(logits: torch.Tensor, rows: SampleRows, first: torch.Tensor, width: int) -> torch.Tensor:
    """The target's distributions at the `width` rows from each of `first` [N] on, fp32 [N, width, V]."""
    steps = torch.arange(width, device=logits.device)
    verified = (first[:, None] + steps).clamp_(max=logits.shape[0] - 1)
    return (logits[verified] * rows.inv_temperature[first, None, None]).softmax(dim=2)
