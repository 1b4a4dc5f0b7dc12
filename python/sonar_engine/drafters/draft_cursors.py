"""How far a drafter with a KV cache has come in every slot. Kept on the host, apart from the target's own count."""

from __future__ import annotations

import numpy as np

from sonar_engine.step_buffers import BatchMetadata


class DraftCursors:
    """`cursors[slot]` leading tokens have the drafter's keys and values in the slot's pages.

    Drafter and target share page ids, and a prefix hit shares pages that the drafter may not have seen: their first
    owner drafted nothing. So a page counts as filled only once the drafter has run over all its positions, from the
    moment it is handed out for new content on.
    """

    def __init__(self, max_num_seqs: int, max_pages_per_seq: int, num_pages: int, page_size: int) -> None:
        self.cursors = np.zeros(max_num_seqs, np.int64)
        self._pages = np.zeros((max_num_seqs, max_pages_per_seq), np.int64)  # the page table's twin
        self._is_filled = np.zeros(num_pages, np.bool_)
        self._page_size = page_size

    def observe(self, batch: BatchMetadata) -> None:
        """The pages and admissions of a step that is about to run."""
        host = batch.host
        computed = np.zeros(len(self.cursors), np.int64)
        computed[host["slots"]] = host["num_computed_tokens"]
        slots, columns, pages = host["new_page_slots"], host["new_page_indices"], host["new_page_ids"]
        if len(slots):
            self._pages[slots, columns] = pages
            is_new = columns * self._page_size >= computed[slots]  # the others are a prefix hit
            self._is_filled[pages[is_new]] = False
        if len(host["admitted_slots"]):
            self._enter(host["admitted_slots"], computed)
        self._rewind_beyond(
            host["slots"], host["num_computed_tokens"] + (np.arange(batch.num_reqs) < batch.num_decode_reqs)
        )

    def advance(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """The drafter has run over the tokens up to `ends` of these slots, int64 [N] each."""
        first = self.cursors[slots] // self._page_size
        counts = np.maximum(ends // self._page_size - first, 0)
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self._is_filled[self._pages[np.repeat(slots, counts), np.repeat(first, counts) + offsets]] = True
        self.cursors[slots] = ends

    def _enter(self, slots: np.ndarray, computed: np.ndarray) -> None:
        """Cursors of admitted slots: the leading pages of the prefix hit that are filled."""
        num_hits = computed[slots] // self._page_size
        width = int(num_hits.max())
        is_filled = self._is_filled[self._pages[slots, :width]] & (np.arange(width) < num_hits[:, None])
        self.cursors[slots] = np.logical_and.accumulate(is_filled, axis=1).sum(axis=1) * self._page_size

    def _rewind_beyond(self, slots: np.ndarray, lens: np.ndarray) -> None:
        """Cursors beyond their sequence belong to a step that was reverted: back to before the last token."""
        for slot, length in zip(*self._beyond(slots, lens), strict=True):
            cursor = max(length - 1, 0)
            self._is_filled[self._pages[slot, cursor // self._page_size : self.cursors[slot] // self._page_size]] = (
                False
            )
            self.cursors[slot] = cursor

    def _beyond(self, slots: np.ndarray, lens: np.ndarray) -> tuple[list[int], list[int]]:
        beyond = self.cursors[slots] > lens
        return slots[beyond].tolist(), lens[beyond].tolist()
