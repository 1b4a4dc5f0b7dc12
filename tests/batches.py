"""`BatchMetadata` made by hand, for tests of models and attention without a scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sonar_engine.step_buffers import BatchMetadata


@dataclass(frozen=True)
class BatchRow:
    """`tokens` run at positions `num_computed_tokens`.. of the sequence in `slot`."""

    slot: int
    num_computed_tokens: int
    tokens: Sequence[int]
    decode: bool = False
    num_draft_tokens: int = 0


class PagedBatches:
    """Hands out pages in random order and builds batches over them. Decode rows are moved to the front."""

    def __init__(
        self,
        *,
        num_pages: int = 256,
        page_size: int = 4,
        max_num_seqs: int = 48,
        max_pages: int = 128,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        self.page_table = torch.full((max_num_seqs, max_pages), -1, dtype=torch.int32, device=device)
        order = np.random.default_rng(seed).permutation(num_pages)
        self._free = [int(page) for page in order]
        self._pages: dict[int, list[int]] = {}
        self._step_id = 0

    def share(self, source: int, target: int, num_pages: int) -> None:
        """Gives the empty slot `target` the first pages of `source`, as a prefix hit does."""
        self._pages[target] = self._pages[source][:num_pages]
        self._write_page_table(target)

    def forget(self, slot: int) -> None:
        """Empties a slot; its pages go back to the end of the free list."""
        self._free.extend(self._pages.pop(slot, []))

    def build(self, rows: Iterable[BatchRow]) -> BatchMetadata:
        rows = sorted(rows, key=lambda row: not row.decode)
        for row in rows:
            self._grow(row.slot, row.num_computed_tokens + len(row.tokens))
        self._step_id += 1
        return _metadata(rows, self._pages, self.page_size, self.page_table, self._step_id)

    def _grow(self, slot: int, length: int) -> None:
        pages = self._pages.setdefault(slot, [])
        while len(pages) * self.page_size < length:
            pages.append(self._free.pop(0))
        self._write_page_table(slot)

    def _write_page_table(self, slot: int) -> None:
        pages = self._pages[slot]
        self.page_table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)


def _metadata(
    rows: list[BatchRow], pages: dict[int, list[int]], page_size: int, page_table: torch.Tensor, step_id: int
) -> BatchMetadata:
    q_len = [len(row.tokens) for row in rows]
    kv_len = [row.num_computed_tokens + len(row.tokens) for row in rows]
    num_decode = sum(row.decode for row in rows)
    positions = [row.num_computed_tokens + i for row in rows for i in range(len(row.tokens))]
    token_reqs = [r for r, row in enumerate(rows) for _ in row.tokens]
    slots = [row.slot for row in rows]
    slot_mapping = [
        pages[slots[r]][p // page_size] * page_size + p % page_size for r, p in zip(token_reqs, positions, strict=True)
    ]
    sample_counts = [1 + row.num_draft_tokens for row in rows]
    qo_indptr = np.concatenate(([0], np.cumsum(q_len)))
    sections = {
        "slots": slots,
        "qo_indptr": qo_indptr,
        "num_draft_tokens": [row.num_draft_tokens for row in rows],
        "num_computed_tokens": [row.num_computed_tokens for row in rows],
        "kv_len": kv_len,
        "paged_kv_indptr": np.concatenate(([0], np.cumsum([-(-n // page_size) for n in kv_len]))),
        "paged_kv_last_page_len": [(n - 1) % page_size + 1 for n in kv_len],
        "output_pos": [0] * len(rows),
        "next_prompt_token": [-1] * len(rows),
        "sample_indptr": np.concatenate(([0], np.cumsum(sample_counts))),
        "sample_rows": [qo_indptr[r + 1] - n + i for r, n in enumerate(sample_counts) for i in range(n)],
        "sample_reqs": [r for r, n in enumerate(sample_counts) for _ in range(n)],
        "token_ids": [token for row in rows for token in row.tokens],
        "positions": positions,
        "slot_mapping": slot_mapping,
        "token_reqs": token_reqs,
    }
    host = {name: np.asarray(values, dtype=np.int32) for name, values in sections.items()}
    return BatchMetadata(
        step_id=step_id,
        num_reqs=len(rows),
        num_decode_reqs=num_decode,
        num_tokens=len(positions),
        num_decode_tokens=sum(q_len[:num_decode]),
        num_drafts=sum(row.num_draft_tokens for row in rows),
        max_draft_tokens=max(row.num_draft_tokens for row in rows),
        max_q_len=max(q_len),
        max_kv_len=max(kv_len),
        num_sample_rows=sum(sample_counts),
        page_table=page_table,
        host=host,
        admitted=[],
        **{name: torch.from_numpy(values.copy()).to(page_table.device) for name, values in host.items()},
    )
