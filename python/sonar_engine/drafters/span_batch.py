"""Batches that a drafter runs by itself: spans of positions of some slots, over the pages the target uses too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sonar_engine.device import to_device
from sonar_engine.step_buffers import BatchMetadata


@dataclass(frozen=True)
class Spans:
    """Row r runs positions starts[r]..ends[r] (half-open, not empty) of `slots[r]`; int64 [R] each, on the host."""

    slots: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @property
    def lens(self) -> np.ndarray:
        return self.ends - self.starts

    def rows(self, index: np.ndarray) -> Spans:
        return Spans(self.slots[index], self.starts[index], self.ends[index])


def span_batch(spans: Spans, page_table: torch.Tensor, page_size: int) -> BatchMetadata:
    """The batch that runs `spans`. It samples nothing, and its `token_ids` are left at 0.

    Every row of `page_table` int32 [max_num_seqs, max_pages] must be valid up to its span's end. Lengths go to the
    device in one copy; pages are looked up there.
    """
    sections = _sections(spans, page_size)
    packed = to_device(np.concatenate(list(sections.values()), dtype=np.int32), page_table.device)
    parts = packed.split([len(values) for values in sections.values()])
    tensors = dict(zip(sections, parts, strict=True))
    positions, token_slots = tensors["positions"], tensors.pop("token_slots")
    pages = page_table[token_slots, positions // page_size]
    num_reqs, num_tokens = len(spans.slots), len(positions)
    max_q_len = int(spans.lens.max())
    num_decode = num_reqs if max_q_len == 1 else 0
    nothing = packed[:0]
    return BatchMetadata(
        step_id=0,
        num_reqs=num_reqs,
        num_decode_reqs=num_decode,
        num_tokens=num_tokens,
        num_decode_tokens=num_decode,
        num_drafts=0,
        max_draft_tokens=0,
        max_q_len=max_q_len,
        max_kv_len=int(spans.ends.max()),
        num_sample_rows=0,
        token_ids=torch.zeros_like(positions),
        slot_mapping=pages * page_size + positions % page_size,
        sample_rows=nothing,
        sample_reqs=nothing,
        page_table=page_table,
        host={name: values.astype(np.int32) for name, values in sections.items() if name != "token_slots"},
        admitted=[],
        **tensors,
    )


def _sections(spans: Spans, page_size: int) -> dict[str, np.ndarray]:
    """What the host knows of the batch, by section name, and `token_slots` [T], each token's slot."""
    lens, num_reqs = spans.lens, len(spans.slots)
    qo_indptr = _indptr(lens)
    token_reqs = np.repeat(np.arange(num_reqs), lens)
    zeros = np.zeros(num_reqs, np.int64)
    return {
        "slots": spans.slots,
        "qo_indptr": qo_indptr,
        "num_draft_tokens": zeros,
        "num_computed_tokens": spans.starts,
        "kv_len": spans.ends,
        "paged_kv_indptr": _indptr(-(-spans.ends // page_size)),
        "paged_kv_last_page_len": (spans.ends - 1) % page_size + 1,
        "output_pos": zeros,
        "next_prompt_token": zeros - 1,
        "sample_indptr": np.zeros(num_reqs + 1, np.int64),
        "positions": np.arange(len(token_reqs)) + (spans.starts - qo_indptr[:-1])[token_reqs],
        "token_reqs": token_reqs,
        "token_slots": spans.slots[token_reqs],
    }


def _indptr(lens: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lens)))
