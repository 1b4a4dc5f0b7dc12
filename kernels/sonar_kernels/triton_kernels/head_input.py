"""Kernels around a draft head: its shifted input tokens, and rows carried by slot."""

# mypy: allow-untyped-defs
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl

BLOCK = 256
BLOCK_COLUMNS = 1024


@triton.jit
def shift_tokens_kernel(
    token_ids,
    token_reqs,
    qo_indptr,
    sample_indptr,
    next_prompt_token,
    emitted,
    shifted,
    emitted_stride,
    num_tokens,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_tokens
    reqs = tl.load(token_reqs + places, mask=inside, other=0)
    row_ends = tl.load(qo_indptr + reqs + 1, mask=inside, other=0)
    first_samples = tl.load(sample_indptr + reqs, mask=inside, other=0)
    num_samples = tl.load(sample_indptr + reqs + 1, mask=inside, other=0) - first_samples
    sample = places - (row_ends - num_samples)  # < 0: followed by a known token
    is_last = places + 1 == row_ends
    known = inside & (sample < 0)
    tokens = tl.load(token_ids + places + 1, mask=known & (is_last == 0), other=0)
    tokens += tl.load(next_prompt_token + reqs, mask=known & is_last, other=0)
    chosen = tl.load(emitted + reqs.to(tl.int64) * emitted_stride + sample, mask=inside & (sample >= 0), other=0)
    tl.store(shifted + places, tokens + tl.maximum(chosen, 0), mask=inside)


def shift_tokens_triton(
    token_ids: torch.Tensor,
    token_reqs: torch.Tensor,
    qo_indptr: torch.Tensor,
    sample_indptr: torch.Tensor,
    next_prompt_token: torch.Tensor,
    emitted: torch.Tensor,
) -> torch.Tensor:
    """Arguments and result as in `sonar_kernels.shift_tokens`."""
    num_tokens, shifted = token_ids.shape[0], torch.empty_like(token_ids)
    emitted = emitted if emitted.stride(1) == 1 else emitted.contiguous()
    if num_tokens:
        shift_tokens_kernel[(triton.cdiv(num_tokens, BLOCK),)](
            token_ids,
            token_reqs,
            qo_indptr,
            sample_indptr,
            next_prompt_token,
            emitted,
            shifted,
            emitted.stride(0),
            num_tokens,
            BLOCK=BLOCK,
        )
    return shifted


@triton.jit
def copy_rows_kernel(
    source, source_rows, target, target_rows, source_stride, target_stride, width, BLOCK: tl.constexpr
):
    index = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source += tl.load(source_rows + index).to(tl.int64) * source_stride
    target += tl.load(target_rows + index).to(tl.int64) * target_stride
    tl.store(target + columns, tl.load(source + columns, mask=inside), mask=inside)


def copy_rows_triton(
    source: torch.Tensor, source_rows: torch.Tensor, target: torch.Tensor, target_rows: torch.Tensor
) -> None:
    """Arguments as in `sonar_kernels.copy_rows`."""
    num_rows, width = source_rows.shape[0], target.shape[1]
    if num_rows and width:
        copy_rows_kernel[(num_rows, triton.cdiv(width, BLOCK_COLUMNS))](
            source,
            source_rows,
            target,
            target_rows,
            source.stride(0),
            target.stride(0),
            width,
            BLOCK=BLOCK_COLUMNS,
        )
