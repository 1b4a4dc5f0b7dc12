"""min-p, top-k and top-p: cutting the tail of rows that ask for it.

Each rule finds a threshold and keeps every token at or above it, so tokens of equal logit share their fate: the
result depends neither on a sort's stability nor on the other rows. Order and meaning as in vLLM: min-p first (against
the largest probability), then top-k, then top-p over what top-k left, renormalised. Probabilities are those at the
rows' temperatures; the logits come and go undivided.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FIRST_WIDTH = 512  # top entries looked at before sorting whole rows, where looking costs no device sync


@dataclass(frozen=True)
class TopLimits:
    """What each of N rows asks, [N] each."""

    inv_temperature: torch.Tensor  # fp32, above 0
    top_k: torch.Tensor  # int, the vocabulary's size when off
    top_p: torch.Tensor  # fp32, 1 when off

    def rows(self, index: torch.Tensor) -> TopLimits:
        return TopLimits(self.inv_temperature[index], self.top_k[index], self.top_p[index])


def cut_min_p(logits: torch.Tensor, inv_temperature: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """Logits [N, V], changed in place: -inf where the probability is below min_p * the largest."""
    least = logits.amax(dim=1, keepdim=True) + (log_min_p / inv_temperature)[:, None]
    return logits.masked_fill_(logits < least, -torch.inf)


def cut_top(logits: torch.Tensor, limits: TopLimits, max_top_k: int) -> torch.Tensor:
    """Logits [N, V], changed in place: -inf where top-k or top-p cut.

    `max_top_k` is the largest of `limits.top_k`, known on the host.
    """
    return logits.masked_fill_(logits < _threshold(logits, limits, max_top_k), -torch.inf)


def _threshold(logits: torch.Tensor, limits: TopLimits, max_top_k: int) -> torch.Tensor:
    """The least logit that is kept, [N, 1]."""
    vocab_size = logits.shape[1]
    if max_top_k <= _FIRST_WIDTH and max_top_k < vocab_size:
        return _threshold_of(logits.topk(max_top_k, dim=1).values, limits, None, vocab_size)[0]
    best = logits.amax(dim=1, keepdim=True)
    total = (logits - best).mul_(limits.inv_temperature[:, None]).exp_().sum(dim=1, keepdim=True)
    if logits.device.type != "cpu" or vocab_size <= 2 * _FIRST_WIDTH:
        return _threshold_of(logits.sort(dim=1, descending=True).values, limits, total, vocab_size)[0]
    threshold, decided = _threshold_of(logits.topk(_FIRST_WIDTH, dim=1).values, limits, total, vocab_size)
    rest = torch.nonzero(~decided[:, 0])[:, 0]
    if rest.numel():
        top = logits[rest].sort(dim=1, descending=True).values
        threshold[rest] = _threshold_of(top, limits.rows(rest), total[rest], vocab_size)[0]
    return threshold


def _threshold_of(
    top: torch.Tensor, limits: TopLimits, total: torch.Tensor | None, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The threshold, and whether `top` [N, W] (the row's largest logits, descending) was wide enough to tell; [N, 1].

    `total` [N, 1] is the sum of weights over the vocabulary, None where every row has a top-k. Sums run along the
    descending order, so that a threshold does not depend on W.
    """
    width = top.shape[1]
    top_k, top_p = limits.top_k[:, None].long(), limits.top_p[:, None]
    weights = (top - top[:, :1]).mul_(limits.inv_temperature[:, None]).exp_()
    sums = weights.cumsum(dim=1)
    of_top_k = sums.gather(1, (top_k - 1).clamp(max=width - 1))
    total = of_top_k if total is None else torch.where(top_k < vocab_size, of_top_k, total)
    in_nucleus = (sums - weights < top_p * total) | (top_p >= 1)
    kept = in_nucleus & (torch.arange(width, device=top.device) < top_k)  # a prefix
    num_kept = kept.sum(dim=1, keepdim=True).clamp_(min=1)
    decided = (top_k <= width) | ((num_kept < width) & (top_k == vocab_size)) | (width == vocab_size)
    return top.gather(1, num_kept - 1), decided
