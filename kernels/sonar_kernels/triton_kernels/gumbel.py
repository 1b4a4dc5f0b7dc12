"""`sonar_kernels.gumbel_argmax` in Triton: one program a row, one pass over its logits."""

# mypy: allow-untyped-defs
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl

from sonar_kernels.triton_kernels.noise import exponential

BLOCK = 2048


@triton.jit
def gumbel_argmax_kernel(
    logits, inv_temperature, seed_lo, seed_hi, positions, tokens, row_stride, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    scale = tl.load(inv_temperature + row)
    lo = tl.load(seed_lo + row)
    hi = tl.load(seed_hi + row)
    position = tl.load(positions + row)
    logits += row.to(tl.int64) * row_stride
    best = float("-inf")
    token = 0
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scores = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        if scale > 0:
            scores = scores * scale - tl.log(exponential(ids, lo, hi, position))
        block_best, block_token = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.where(block_best > best, start + block_token, token)
        best = tl.maximum(best, block_best)
    tl.store(tokens + row, token)


def gumbel_argmax_triton(
    logits: torch.Tensor,
    inv_temperature: torch.Tensor,
    seed_lo: torch.Tensor,
    seed_hi: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Arguments and result as in `sonar_kernels.gumbel_argmax`."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        vectors = [vector.contiguous() for vector in (inv_temperature, seed_lo, seed_hi, positions)]
        gumbel_argmax_kernel[(num_rows,)](logits, *vectors, tokens, logits.stride(0), vocab_size, BLOCK=BLOCK)
    return tokens
