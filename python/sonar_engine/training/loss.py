"""The loss of drafts against the target's distribution, fused: no logits are kept for the backward pass.

The target's distribution p at a position is recomputed from its last hidden state, over the draft vocabulary and
renormalised there; q is the head's. The output matrix is frozen, so that the gradient of a row's cross entropy by its
state, (q - p) W, is known as soon as q is: the forward pass computes it, a piece of positions at a time, with p
computed once for all drafts of a position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sonar_engine.training.packing import PackedBatch

_PIECE = 256  # target positions at a time

# B rows, M start slots, K draft steps, W draft vocabulary, N = B * M.


@dataclass(frozen=True)
class OutputRows:
    """The target's output matrix as a draft sees it.

    `rows` [W, H] are those of the draft vocabulary; `token_map` int64 [W] its target ids, None: all. `whole` [V, H] is
    the whole matrix, where probabilities outside the draft vocabulary are to count in `overlap`.
    """

    rows: torch.Tensor
    token_map: torch.Tensor | None
    whole: torch.Tensor | None = None


class DraftOutcome(NamedTuple):
    """By draft step and start slot, [K, B, M], without gradient; zero where the text ends before the draft token."""

    loss: torch.Tensor  # fp32, KL(p || q) in nats over the draft vocabulary
    overlap: torch.Tensor  # fp32, sum of min(p, q): the share of sampled drafts that token verification accepts
    drafts: torch.Tensor  # int64, the argmax of q as a target id
    targets: torch.Tensor  # int64, the argmax of p as a target id, within the draft vocabulary
    valid: torch.Tensor  # bool, whether the text has such a token


def step_weights(batch: PackedBatch, num_steps: int, decay: float, num_texts: int) -> torch.Tensor:
    """fp32 [K, B, M]: each text counts alike, step k `decay` times as much as the one before; all sum up to at most 1.

    `num_texts` is that of the whole batch, over all ranks.
    """
    share = torch.tensor([decay**step for step in range(num_steps)], device=batch.weights.device)
    share = share / share.sum() / max(num_texts, 1)
    return share[:, None, None] * batch.weights * has_token(batch, num_steps)


def has_token(batch: PackedBatch, num_steps: int) -> torch.Tensor:
    """bool [K, B, M]: the text has a token for draft step k of the slot."""
    ahead = torch.arange(2, num_steps + 2, device=batch.slots.device)[:, None, None]
    return batch.slots + ahead <= batch.lasts


def draft_loss(
    states: torch.Tensor, batch: PackedBatch, output: OutputRows, weights: torch.Tensor
) -> tuple[torch.Tensor, DraftOutcome]:
    """states [K, B, M, H] of `run_recursion`, weights [K, B, M] -> the weighted sum of losses, and its parts."""
    num_steps, rows, slots, size = states.shape
    length = batch.tokens.shape[1]
    offsets = torch.arange(rows, device=states.device)[:, None] * length
    starts = (batch.slots + offsets).flatten()  # [N], in the flat positions
    row_of = torch.full((rows * length + num_steps + 1,), -1, device=states.device)
    in_use = batch.lasts.flatten() >= 0
    row_of[starts[in_use]] = torch.nonzero(in_use).flatten()
    valid = has_token(batch, num_steps).flatten(1)  # [K, N]
    comparison = _Comparison(batch.hidden.flatten(0, 1), row_of, valid, weights.flatten(1), output)
    loss, *parts = _FusedLoss.apply(states.reshape(num_steps, rows * slots, size), comparison)
    return loss, DraftOutcome(*(part.view(num_steps, rows, slots) for part in (*parts, valid)))


@dataclass(frozen=True)
class _Comparison:
    """What states are compared with."""

    hidden: torch.Tensor  # [positions, H], the target's
    row_of: torch.Tensor  # int64 [positions + K + 1], the start slot at a flat position, -1 for none
    valid: torch.Tensor  # bool [K, N]
    weights: torch.Tensor  # fp32 [K, N]
    output: OutputRows


class _FusedLoss(torch.autograd.Function):
    """See the module's docstring."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, comparison: _Comparison) -> Any:
        hidden, row_of, valid = comparison.hidden, comparison.row_of, comparison.valid
        weights, output = comparison.weights, comparison.output
        needs_grad = states.requires_grad
        gradient = torch.zeros_like(states) if needs_grad else None
        num_steps, num_rows = valid.shape
        losses, overlap = torch.zeros(2, num_steps, num_rows, device=states.device)
        drafts, targets = torch.zeros(2, num_steps, num_rows, dtype=torch.int64, device=states.device)
        for positions in _positions(row_of, valid, len(hidden)).split(_PIECE):
            target = _Target.of(hidden[positions].to(states.dtype), output)
            for step in range(num_steps):
                rows = row_of[positions - step - 1]
                here = (rows >= 0) & valid[step, rows]
                which = torch.nonzero(here).flatten()
                if len(which) == 0:
                    continue
                rows = rows[which]
                logits = (states[step, rows] @ output.rows.T).float()
                p = target.probs[which]
                norm = logits.logsumexp(-1)
                losses[step, rows] = norm - torch.linalg.vecdot(p, logits) - target.entropy[which]
                drafts[step, rows] = _ids(logits.argmax(-1), output)
                targets[step, rows] = target.top[which]
                q = logits.sub_(norm[:, None]).exp_()
                overlap[step, rows] = target.overlap(which, q)
                if gradient is not None:
                    q.sub_(p).mul_(weights[step, rows, None])
                    gradient[step, rows] = q.to(states.dtype) @ output.rows
        ctx.gradient = gradient
        ctx.mark_non_differentiable(losses, overlap, drafts, targets)
        return (losses * weights).sum(), losses, overlap, drafts, targets

    @staticmethod
    def backward(ctx: Any, grad_loss: Any, *unused: Any) -> Any:
        return ctx.gradient * grad_loss, None


def _positions(row_of: torch.Tensor, valid: torch.Tensor, num_positions: int) -> torch.Tensor:
    """The flat positions whose distribution some draft is compared with, ascending."""
    used = torch.zeros(num_positions, dtype=torch.bool, device=valid.device)
    starts = torch.nonzero(row_of[:num_positions] >= 0).flatten()
    for step in range(len(valid)):
        used[(starts + step + 1)[valid[step, row_of[starts]]]] = True
    return torch.nonzero(used).flatten()


@dataclass(frozen=True)
class _Target:
    """The target's distributions at N positions."""

    probs: torch.Tensor  # fp32 [N, W], over the draft vocabulary, renormalised
    mass: torch.Tensor | None  # fp32 [N], their share of all; None: not known
    entropy: torch.Tensor  # fp32 [N], of `probs`, in nats
    top: torch.Tensor  # int64 [N]

    @classmethod
    def of(cls, hidden: torch.Tensor, output: OutputRows) -> _Target:
        logits = (hidden @ output.rows.T).float()
        norm = logits.logsumexp(-1)
        mass = None if output.whole is None else (norm - (hidden @ output.whole.T).float().logsumexp(-1)).exp()
        top = _ids(logits.argmax(-1), output)
        probs = (logits - norm[:, None]).exp_()
        entropy = norm - torch.linalg.vecdot(probs, logits)
        return cls(probs, mass, entropy, top)

    def overlap(self, which: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        p = self.probs[which]
        return torch.minimum(p if self.mass is None else p * self.mass[which, None], q).sum(-1)


def _ids(columns: torch.Tensor, output: OutputRows) -> torch.Tensor:
    return columns if output.token_map is None else output.token_map[columns]


def feature_loss(features: torch.Tensor, batch: PackedBatch, weights: torch.Tensor) -> torch.Tensor:
    """Smooth L1 between features [K, B, M, H] and the target's states at the positions that they stand for."""
    length, size = batch.tokens.shape[1], features.shape[-1]
    total = features.new_zeros((), dtype=torch.float32)
    for step in range(len(features)):
        at = (batch.slots + step + 1).clamp(max=length - 1)
        wanted = batch.hidden.gather(1, at[..., None].expand(-1, -1, size))
        rows = torch.nn.functional.smooth_l1_loss(features[step].float(), wanted.float(), reduction="none").mean(-1)
        total = total + (rows * weights[step]).sum()
    return total
