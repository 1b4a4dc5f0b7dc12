"""Drawing from softmax(logits / temperature) by the Gumbel-max trick, with counter-based coins."""

from __future__ import annotations

import torch

from sonar_kernels import coins

_SCORES_AT_ONCE = 1 << 20  # bounds the torch twin's scratch memory


def gumbel_argmax(
    logits: torch.Tensor,
    inv_temperature: torch.Tensor,
    seed_lo: torch.Tensor,
    seed_hi: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """logits fp32 [S, V]; the rest [S] (fp32, then int32) -> int32 [S].

    argmax of logits * inv_temperature - log(exponential(id, seed, position)); inverse temperature 0 is greedy:
    argmax of logits. The lowest id wins ties.
    """
    if logits.is_cuda:
        from sonar_kernels.triton_kernels.gumbel import gumbel_argmax_triton

        return gumbel_argmax_triton(logits, inv_temperature, seed_lo, seed_hi, positions)
    return gumbel_argmax_torch(logits, inv_temperature, seed_lo, seed_hi, positions)


def gumbel_argmax_torch(
    logits: torch.Tensor,
    inv_temperature: torch.Tensor,
    seed_lo: torch.Tensor,
    seed_hi: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The torch twin of `gumbel_argmax`."""
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    tokens = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    rows_at_once = max(1, _SCORES_AT_ONCE // logits.shape[1])
    for start in range(0, logits.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        noise = coins.exponential(ids, seed_lo[rows, None], seed_hi[rows, None], positions[rows, None]).log_()
        sampled = inv_temperature[rows, None] > 0
        scale = torch.where(sampled, inv_temperature[rows, None], 1.0)
        scores = logits[rows] * scale - noise.masked_fill_(~sampled, 0.0)
        tokens[rows] = scores.argmax(dim=1).to(torch.int32)
    return tokens
