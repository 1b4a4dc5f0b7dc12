"""min-p, top-k and top-p: cutting the tail of rows that ask for it.

Each rule finds a threshold and keeps every token at or above it, so tokens of equal logit share their fate: the
result depends neither on a sort's stability nor on the other rows. Order and meaning as in vLLM: min-p first (against
the largest probability), then top-k, then top-p over what top-k left, renormalised. Probabilities are those at the
rows' temperatures; the logits come and go undivided.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_WIDTHS = (64, 1024)  # top entries looked at before sorting whole rows


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
    """The least logit that is kept, [N, 1]: from the few largest where they can tell, else from the sorted row."""
    vocab_size = logits.shape[1]
    total = _total(logits, limits) if max_top_k == vocab_size else None
    rest = torch.arange(logits.shape[0], device=logits.device)
    threshold = logits.new_empty((logits.shape[0], 1))
    for width in _widths(logits, max_top_k):
        rows = logits if len(rest) == len(logits) else logits[rest]
        top = rows.topk(width, dim=1).values if width < vocab_size else rows.sort(dim=1, descending=True).values
        found, decided = _threshold_of(top, limits.rows(rest), None if total is None else total[rest], vocab_size)
        threshold[rest] = found
        if width < max_top_k:  # else all is decided
            rest = rest[~decided[:, 0]]
            if len(rest) == 0:
                break
    return threshold


def _widths(logits: torch.Tensor, max_top_k: int) -> list[int]:
    """Widths to try in turn, the last of which decides. Trying needs an answer from the device: the CPU's is free."""
    narrow = [width for width in _WIDTHS if width < max_top_k] if logits.device.type == "cpu" else []
    return [*narrow, max_top_k if max_top_k <= _WIDTHS[-1] else logits.shape[1]]


def _total(logits: torch.Tensor, limits: TopLimits) -> torch.Tensor:
    """Sum of exp((logit - largest) / temperature) over each row, [N, 1]."""
    weights = (logits - logits.amax(dim=1, keepdim=True)).mul_(limits.inv_temperature[:, None]).exp_()
    return weights.sum(dim=1, keepdim=True)


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
