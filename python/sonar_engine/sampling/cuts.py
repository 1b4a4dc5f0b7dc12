"""min-p, top-k and top-p: cutting the tail of rows that ask for it.

Each rule finds a threshold and keeps every token at or above it, so tokens of equal logit share their fate: the
result depends neither on a sort's stability nor on the other rows. Order and meaning as in vLLM: min-p first (against
the largest probability), then top-k, then top-p over what top-k left, renormalised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FIRST_WIDTH = 512  # top entries looked at before sorting whole rows, where looking costs no device sync


def cut_min_p(logits: torch.Tensor, log_min_p: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] over the temperature -> a copy with -inf where the probability is below min_p * the largest."""
    least = logits.amax(dim=1, keepdim=True) + log_min_p[:, None]
    return logits.masked_fill(logits < least, -torch.inf)


def cut_top(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """Logits [N, V] over the temperature -> a copy with -inf where top-k or top-p cut.

    top_k int [N] (V: off), top_p fp32 [N] (1: off, else the least set of that mass is kept); `max_top_k` is the
    largest of `top_k`, known on the host.
    """
    best = logits.amax(dim=1, keepdim=True)
    limits = _Limits(best, (logits - best).exp_().sum(dim=1, keepdim=True), top_k[:, None].long(), top_p[:, None])
    return logits.masked_fill(logits < _threshold(logits, limits, max_top_k), -torch.inf)


@dataclass(frozen=True)
class _Limits:
    """What each of N rows asks, [N, 1] each."""

    best: torch.Tensor  # largest logit
    total: torch.Tensor  # sum of exp(logit - best) over the row
    top_k: torch.Tensor
    top_p: torch.Tensor

    def rows(self, index: torch.Tensor) -> _Limits:
        return _Limits(self.best[index], self.total[index], self.top_k[index], self.top_p[index])


def _threshold(logits: torch.Tensor, limits: _Limits, max_top_k: int) -> torch.Tensor:
    """The least logit that is kept, [N, 1]."""
    vocab_size = logits.shape[1]
    if max_top_k <= _FIRST_WIDTH:
        return _threshold_of(logits.topk(max_top_k, dim=1).values, limits, vocab_size)[0]
    if logits.device.type != "cpu" or vocab_size <= 2 * _FIRST_WIDTH:
        return _threshold_of(logits.sort(dim=1, descending=True).values, limits, vocab_size)[0]
    threshold, decided = _threshold_of(logits.topk(_FIRST_WIDTH, dim=1).values, limits, vocab_size)
    rest = torch.nonzero(~decided[:, 0])[:, 0]
    if rest.numel():
        top = logits[rest].sort(dim=1, descending=True).values
        threshold[rest] = _threshold_of(top, limits.rows(rest), vocab_size)[0]
    return threshold


def _threshold_of(top: torch.Tensor, limits: _Limits, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The threshold, and whether `top` [N, W] (the row's largest logits, descending) was wide enough to tell; [N, 1].

    Sums run along the descending order, so that a threshold does not depend on W.
    """
    width = top.shape[1]
    weights = (top - limits.best).exp_()
    sums = weights.cumsum(dim=1)
    of_top_k = sums.gather(1, (limits.top_k - 1).clamp(max=width - 1))
    total = torch.where(limits.top_k < vocab_size, of_top_k, limits.total)
    in_nucleus = (sums - weights < limits.top_p * total) | (limits.top_p >= 1)
    kept = in_nucleus & (torch.arange(width, device=top.device) < limits.top_k)  # a prefix
    num_kept = kept.sum(dim=1, keepdim=True).clamp_(min=1)
    decided = (limits.top_k <= width) | ((num_kept < width) & (limits.top_k == vocab_size)) | (width == vocab_size)
    return top.gather(1, num_kept - 1), decided
