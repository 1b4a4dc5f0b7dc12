"""Batches of one shape in tensors that stay where they are, padded to that shape."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from sonar_engine.device import write_to_device
from sonar_engine.kv_cache import KvCache
from sonar_engine.step_buffers import BatchMetadata


class FixedBatch:
    """R rows of Q tokens: those of a batch, then padding rows. T = R * Q.

    A padding row is in the slot behind the others, whose pages are all the spare page, with Q tokens from position 0
    on. Beside counts, `fill` writes what a forward pass reads; the drafts, samples and token ids of a batch stay out.
    """

    def __init__(self, num_rows: int, q_len: int, kv_cache: KvCache) -> None:
        """`kv_cache` has a spare page. Allocates one int32 tensor for everything."""
        if kv_cache.padded_table is None:
            raise ValueError("a padded batch needs a KV cache with a spare page")
        sections = _padding(num_rows, q_len, kv_cache)
        bounds = np.cumsum([0] + [len(values) for values in sections.values()]).tolist()
        self._spans = dict(zip(sections, pairwise(bounds), strict=True))
        self._padding = np.concatenate(list(sections.values()), dtype=np.int32)
        self._packed = torch.zeros(bounds[-1], dtype=torch.int32, device=kv_cache.page_table.device)
        tensors = {name: self._packed[start:end] for name, (start, end) in self._spans.items()}
        nothing = self._packed[:0]
        self._batch = BatchMetadata(
            step_id=0,
            num_reqs=num_rows,
            num_decode_reqs=num_rows,
            num_tokens=num_rows * q_len,
            num_decode_tokens=num_rows * q_len,
            num_drafts=0,
            max_draft_tokens=0,
            max_q_len=q_len,
            max_kv_len=q_len,
            num_sample_rows=0,
            num_draft_tokens=nothing,
            output_pos=nothing,
            next_prompt_token=nothing,
            sample_indptr=nothing,
            sample_rows=nothing,
            sample_reqs=nothing,
            token_ids=nothing,
            page_table=kv_cache.padded_table,
            host={},
            admitted=[],
            **tensors,
        )
        self._batch.is_fixed = True

    def fill(self, batch: BatchMetadata | None) -> BatchMetadata:
        """The rows of `batch`, at most R with Q tokens each, then padding; None: padding alone.

        The same object in every call. Waits for nothing.
        """
        words = self._padding.copy()
        sections = {name: words[start:end] for name, (start, end) in self._spans.items()}
        if batch is not None:
            _copy_rows(batch, sections)
        write_to_device(words, self._packed)
        if batch is not None:  # page ids are known on the device alone
            self._batch.slot_mapping[: batch.num_tokens].copy_(batch.slot_mapping)
        del sections["slot_mapping"]
        self._batch.host = sections
        self._batch.max_kv_len = max(self._batch.max_q_len, 0 if batch is None else batch.max_kv_len)
        return self._batch


def _copy_rows(batch: BatchMetadata, sections: dict[str, np.ndarray]) -> None:
    """Puts the batch's rows before the padding."""
    num_rows = batch.num_reqs
    for name in ("slots", "num_computed_tokens", "kv_len", "paged_kv_last_page_len"):
        sections[name][:num_rows] = batch.host[name]
    sections["positions"][: batch.num_tokens] = batch.host["positions"]
    indptr, real = sections["paged_kv_indptr"], batch.host["paged_kv_indptr"]
    indptr[num_rows:] += real[-1] - indptr[num_rows]
    indptr[:num_rows] = real[:-1]


def _padding(num_rows: int, q_len: int, kv_cache: KvCache) -> dict[str, np.ndarray]:
    """The sections of a batch whose rows are all padding."""
    page_size = kv_cache.plan.page_size
    num_pages = -(-q_len // page_size)
    first_spare = kv_cache.plan.num_pages * page_size
    rows, positions = np.arange(num_rows), np.tile(np.arange(q_len), num_rows)
    return {
        "slots": np.full(num_rows, kv_cache.page_table.shape[0]),
        "qo_indptr": np.arange(num_rows + 1) * q_len,
        "num_computed_tokens": np.zeros(num_rows, np.int64),
        "kv_len": np.full(num_rows, q_len),
        "paged_kv_indptr": np.arange(num_rows + 1) * num_pages,
        "paged_kv_last_page_len": np.full(num_rows, q_len - (num_pages - 1) * page_size),
        "positions": positions,
        "slot_mapping": first_spare + positions % page_size,
        "token_reqs": np.repeat(rows, q_len),
    }
