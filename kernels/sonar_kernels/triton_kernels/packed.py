"""Kernels over the packed batch: draft tokens into place, the page table, flat page indices."""

# mypy: allow-untyped-defs
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def fill_draft_tokens_kernel(
    token_ids, token_reqs, qo_indptr, draft_tokens, draft_stride, num_tokens, num_decode, BLOCK: tl.constexpr
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_tokens
    reqs = tl.load(token_reqs + places, mask=inside, other=0)
    missing = inside & (reqs < num_decode) & (tl.load(token_ids + places, mask=inside, other=0) < 0)
    steps = places - tl.load(qo_indptr + reqs, mask=missing, other=0) - 1
    drafts = tl.load(draft_tokens + reqs.to(tl.int64) * draft_stride + steps, mask=missing, other=0)
    tl.store(token_ids + places, drafts, mask=missing)


def fill_draft_tokens_triton(
    token_ids: torch.Tensor, token_reqs: torch.Tensor, qo_indptr: torch.Tensor, draft_tokens: torch.Tensor
) -> None:
    """Arguments as in `sonar_kernels.fill_draft_tokens`."""
    num_tokens, (num_decode, width) = token_ids.shape[0], draft_tokens.shape
    if num_tokens and num_decode and width:
        drafts = draft_tokens if draft_tokens.stride(1) == 1 else draft_tokens.contiguous()
        fill_draft_tokens_kernel[(triton.cdiv(num_tokens, BLOCK),)](
            token_ids, token_reqs, qo_indptr, drafts, drafts.stride(0), num_tokens, num_decode, BLOCK=BLOCK
        )


@triton.jit
def update_page_table_kernel(page_table, slots, indices, ids, row_stride, num_pages, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_pages
    slot = tl.load(slots + places, mask=inside, other=0).to(tl.int64)
    index = tl.load(indices + places, mask=inside, other=0)
    page = tl.load(ids + places, mask=inside, other=0)
    tl.store(page_table + slot * row_stride + index, page, mask=inside)


def update_page_table_triton(
    page_table: torch.Tensor, new_page_slots: torch.Tensor, new_page_indices: torch.Tensor, new_page_ids: torch.Tensor
) -> None:
    """Arguments as in `sonar_kernels.update_page_table`."""
    num_pages = new_page_ids.shape[0]
    if num_pages:
        update_page_table_kernel[(triton.cdiv(num_pages, BLOCK),)](
            page_table,
            new_page_slots,
            new_page_indices,
            new_page_ids,
            page_table.stride(0),
            num_pages,
            BLOCK=BLOCK,
        )


@triton.jit
def build_page_indices_kernel(page_table, slots, paged_kv_indptr, page_indices, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    first = tl.load(paged_kv_indptr + row)
    num_pages = tl.load(paged_kv_indptr + row + 1) - first
    page_table += tl.load(slots + row).to(tl.int64) * row_stride
    for start in range(0, num_pages, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_pages
        tl.store(page_indices + first + columns, tl.load(page_table + columns, mask=inside, other=0), mask=inside)


def build_page_indices_triton(
    page_table: torch.Tensor, slots: torch.Tensor, paged_kv_indptr: torch.Tensor, num_indices: int
) -> torch.Tensor:
    """Arguments and result as in `sonar_kernels.build_page_indices`."""
    page_indices = torch.empty(num_indices, dtype=torch.int32, device=page_table.device)
    if num_indices:
        build_page_indices_kernel[(slots.shape[0],)](
            page_table, slots, paged_kv_indptr, page_indices, page_table.stride(0), BLOCK=BLOCK
        )
    return page_indices
