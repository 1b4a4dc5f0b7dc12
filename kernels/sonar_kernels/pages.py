"""The page table by slot, and the flat page indices that paged attention reads."""

from __future__ import annotations

import torch


def update_page_table(
    page_table: torch.Tensor, new_page_slots: torch.Tensor, new_page_indices: torch.Tensor, new_page_ids: torch.Tensor
) -> None:
    """page_table[new_page_slots, new_page_indices] = new_page_ids, in place; int32, each place at most once."""
    if page_table.is_cuda:
        from sonar_kernels.triton_kernels.packed import update_page_table_triton

        update_page_table_triton(page_table, new_page_slots, new_page_indices, new_page_ids)
    else:
        page_table[new_page_slots, new_page_indices] = new_page_ids


def build_page_indices(
    page_table: torch.Tensor, slots: torch.Tensor, paged_kv_indptr: torch.Tensor, num_indices: int
) -> torch.Tensor:
    """`paged_kv_indices` int32 [num_indices]: each row's pages in order, rows end to end.

    page_table int32 [max_num_seqs, max_pages], slots int32 [R], paged_kv_indptr int32 [R + 1] whose last entry is
    `num_indices` (known on the host, so that nothing waits for the device).
    """
    if page_table.is_cuda:
        from sonar_kernels.triton_kernels.packed import build_page_indices_triton

        return build_page_indices_triton(page_table, slots, paged_kv_indptr, num_indices)
    return build_page_indices_torch(page_table, slots, paged_kv_indptr, num_indices)


def build_page_indices_torch(
    page_table: torch.Tensor, slots: torch.Tensor, paged_kv_indptr: torch.Tensor, num_indices: int
) -> torch.Tensor:
    """The torch twin of `build_page_indices`."""
    places = torch.arange(num_indices, dtype=torch.int32, device=page_table.device)
    rows = torch.searchsorted(paged_kv_indptr, places, right=True) - 1
    return page_table[slots[rows], places - paged_kv_indptr[rows]]
