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
    sections = _sections(spans, page_table.shape[1], page_size)
    on_host = np.concatenate(list(sections.values()), dtype=np.int32)
    bounds = np.cumsum([0] + [len(values) for values in sections.values()]).tolist()
    packed = to_device(on_host, page_table.device)
    tensors = {name: packed[start:end] for name, start, end in zip(sections, bounds, bounds[1:], strict=False)}
    places, offsets = tensors.pop("page_places"), tensors.pop("page_offsets")
    pages = page_table.view(-1).index_select(0, places)
    num_reqs, num_tokens = len(spans.slots), len(places)
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
        token_ids=torch.zeros_like(offsets),
        slot_mapping=torch.add(offsets, pages, alpha=page_size),
        sample_rows=nothing,
        sample_reqs=nothing,
        page_table=page_table,
        host={name: on_host[start:end] for name, start, end in zip(sections, bounds, bounds[1:], strict=False)},
        admitted=[],
        **tensors,
    )


def _sections(spans: Spans, max_pages: int, page_size: int) -> dict[str, np.ndarray]:
    """What the host knows of the batch, by section name.

    For each token [T] also `page_places`, its place in the flat page table, and `page_offsets`, its place in the page.
    """
    lens, num_reqs = spans.lens, len(spans.slots)
    qo_indptr = _indptr(lens)
    token_reqs = np.repeat(np.arange(num_reqs), lens)
    positions = np.arange(len(token_reqs)) + (spans.starts - qo_indptr[:-1])[token_reqs]
    columns, offsets = np.divmod(positions, page_size)
    last_column, last_offset = np.divmod(spans.ends - 1, page_size)
    zeros = np.zeros(num_reqs, np.int64)
    return {
        "slots": spans.slots,
        "qo_indptr": qo_indptr,
        "num_draft_tokens": zeros,
        "num_computed_tokens": spans.starts,
        "kv_len": spans.ends,
        "paged_kv_indptr": _indptr(last_column + 1),
        "paged_kv_last_page_len": last_offset + 1,
        "output_pos": zeros,
        "next_prompt_token": zeros - 1,
        "sample_indptr": np.zeros(num_reqs + 1, np.int64),
        "positions": positions,
        "token_reqs": token_reqs,
        "page_places": spans.slots[token_reqs] * max_pages + columns,
        "page_offsets": offsets,
    }


def _indptr(lens: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lens)))
