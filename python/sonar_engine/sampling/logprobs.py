"""Log-probabilities of emitted tokens, from the target's raw logits: before any processing and at temperature 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sonar_engine.device import to_device
from sonar_engine.drafters.base import Verdict
from sonar_engine.sampling.state import LOGPROBS, SampleRows, SamplingState


@dataclass(frozen=True)
class RawLogits:
    """Raw logits of the rows whose requests asked for logprobs. n = such rows."""

    index: torch.Tensor  # int64 [n], which of the S sampled rows
    logits: torch.Tensor  # fp32 [n, V]
    width: int  # top entries of the widest request, at least 1


class LogprobTensors(NamedTuple):
    """Per sampled row. S = sampled rows, M = top entries of the widest request; rows that asked for none hold 0."""

    logprobs: torch.Tensor  # fp32 [S]
    ranks: torch.Tensor  # int32 [S], 1 = most likely; tokens of equal logit share the better rank
    top_ids: torch.Tensor  # int32 [S, M]
    top_logprobs: torch.Tensor  # fp32 [S, M]


def keep_raw(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> RawLogits | None:
    """Call before the logits are processed in place; None when nobody asks."""
    if not rows.all_uses & LOGPROBS:
        return None
    asking = rows.that_use(LOGPROBS)
    index = to_device(asking, logits.device)
    width = max(int(state.num_logprobs[rows.host_slots[asking]].max()), 1)
    return RawLogits(index, logits[index], min(width, logits.shape[1]))


def compute(raw: RawLogits, rows: SampleRows, verdict: Verdict) -> LogprobTensors:
    """What the emitted tokens, and the most likely ones, had as log-probability."""
    offsets = rows.offsets[raw.index]
    tokens = verdict.tokens[rows.reqs[raw.index], offsets].long().clamp_(min=0)
    found = logprobs_of(raw.logits, tokens, raw.width)
    num_rows = rows.uses.shape[0]
    return LogprobTensors(*(_spread(values, raw.index, num_rows) for values in found))


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, width: int) -> LogprobTensors:
    """Of row i's `tokens[i]` (int64 [n]) and of its `width` most likely tokens, from logits fp32 [n, V]."""
    log_total = logits.logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None])
    top = logits.topk(width, dim=1)
    return LogprobTensors(
        logprobs=(chosen - log_total)[:, 0],
        ranks=((logits > chosen).sum(dim=1) + 1).to(torch.int32),
        top_ids=top.indices.to(torch.int32),
        top_logprobs=top.values - log_total,
    )


def _spread(values: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    return values.new_zeros((num_rows, *values.shape[1:])).index_copy_(0, index, values)
