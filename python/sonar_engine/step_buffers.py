"""The packed step: one flat int32 buffer written by the planner, and the tensor views the device code reads.

The layout (header words and section order) is defined by `packed_batch.rs`; `SECTIONS` mirrors it and a test
pins both. Two slots alternate, so that a slot is never rewritten under a running copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sonar_kernels import update_page_table

from sonar_engine.errors import ConfigError, StaleStepError

MAGIC = 0x534E5231
HEADER_WORDS = 64
SECTION_OFFSETS_AT = 32  # header words 32.. hold the word offset of each section

HEADER = {
    "magic": 0,
    "step_id_lo": 1,
    "step_id_hi": 2,
    "num_reqs": 3,
    "num_decode_reqs": 4,
    "num_tokens": 5,
    "num_decode_tokens": 6,
    "num_draft_tokens": 7,
    "max_q_len": 8,
    "max_kv_len": 9,
    "num_sample_rows": 10,
    "num_sampling_reqs": 11,
    "num_new_pages": 12,
    "num_admitted": 13,
    "max_draft_tokens": 14,
    "num_words": 15,
}

# name -> length as a function of the header; order is the order in the buffer
SECTIONS = (
    "slots",  # [R] stable slot of each row; decode rows come first
    "qo_indptr",  # [R + 1] rows' token ranges, half-open
    "num_draft_tokens",  # [R]
    "num_computed_tokens",  # [R] before this step
    "kv_len",  # [R] num_computed_tokens + tokens of this step
    "paged_kv_indptr",  # [R + 1]
    "paged_kv_last_page_len",  # [R] 1..page_size
    "output_pos",  # [R] output tokens so far = index of the next output token
    "next_prompt_token",  # [R] the token after this chunk, -1 when this chunk reaches the end
    "sample_indptr",  # [R + 1] rows' ranges in sample_rows; empty when the row does not sample
    "sample_rows",  # [S] token indices whose logits are needed
    "sample_reqs",  # [S] batch row of each of them
    "token_ids",  # [T] -1 where a draft token goes
    "positions",  # [T]
    "slot_mapping",  # [T] page id * page_size + offset
    "token_reqs",  # [T] batch row of each token
    "new_page_slots",  # [P] page-table row
    "new_page_indices",  # [P] column
    "new_page_ids",  # [P]
    "admitted_slots",  # [A]
    "admitted_ids",  # [2 A] request id as (low, high) words
)


@dataclass
class BatchMetadata:
    """One step's batch. Filled by `StepBuffers.load`; all tensors int32 on the device unless marked host.

    R = rows (requests), D = decode rows (the first D), T = tokens, S = sampled rows. See `SECTIONS` for shapes.
    """

    step_id: int
    num_reqs: int
    num_decode_reqs: int
    num_tokens: int
    num_decode_tokens: int  # tokens of the decode rows: they are the first ones
    num_drafts: int  # draft tokens of the whole batch
    max_draft_tokens: int  # most of any row
    max_q_len: int
    max_kv_len: int
    num_sample_rows: int
    slots: torch.Tensor
    qo_indptr: torch.Tensor
    num_draft_tokens: torch.Tensor
    num_computed_tokens: torch.Tensor
    kv_len: torch.Tensor
    paged_kv_indptr: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    output_pos: torch.Tensor
    next_prompt_token: torch.Tensor
    sample_indptr: torch.Tensor
    sample_rows: torch.Tensor
    sample_reqs: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    token_reqs: torch.Tensor
    page_table: torch.Tensor  # [max_num_seqs, max_pages], by slot; rows are valid up to kv_len
    host: Mapping[str, np.ndarray]  # every section on the host, by name (views of the slot; valid for this step)
    admitted: list[tuple[int, int]]  # (slot, request id) of requests that entered a slot with this step
    is_fixed: bool = field(default=False, init=False)  # its tensors hold every batch of these counts in turn


_BATCH_COUNTS = (
    "num_reqs",
    "num_decode_reqs",
    "num_tokens",
    "num_decode_tokens",
    "max_draft_tokens",
    "max_q_len",
    "max_kv_len",
    "num_sample_rows",
)
_BATCH_TENSORS = tuple(name for name in SECTIONS if not name.startswith(("new_page", "admitted")))
_PER_REQUEST_AND_ONE = ("qo_indptr", "paged_kv_indptr", "sample_indptr")
_SECTION_COUNTS = {
    "sample_rows": "num_sample_rows",
    "sample_reqs": "num_sample_rows",
    "token_ids": "num_tokens",
    "positions": "num_tokens",
    "slot_mapping": "num_tokens",
    "token_reqs": "num_tokens",
    "new_page_slots": "num_new_pages",
    "new_page_indices": "num_new_pages",
    "new_page_ids": "num_new_pages",
    "admitted_slots": "num_admitted",
}


_SECTION_INDEX = {name: index for index, name in enumerate(SECTIONS)}


def _length_of(name: str) -> tuple[int, int, int]:
    """(header word, factor, extra): a section is factor * that word + extra words long."""
    if name == "admitted_ids":
        return HEADER["num_admitted"], 2, 0
    return HEADER[_SECTION_COUNTS.get(name, "num_reqs")], 1, int(name in _PER_REQUEST_AND_ONE)


_SECTION_LENGTHS = [_length_of(name) for name in SECTIONS]


class StepBuffers:
    """The two packed slots as tensors, their device twins, and the page table they keep up to date.

    On the CPU every view is the planner's memory itself; on a device one copy a step brings it over. A slot
    may be written again once the step after next is planned, which the alternation guarantees.
    """

    def __init__(self, host_slots: tuple[np.ndarray, np.ndarray], page_table: torch.Tensor) -> None:
        """`host_slots` int32 [words] each; `page_table` int32 [max_num_seqs, max_pages] on the device."""
        self._host = host_slots
        self._page_table = page_table
        words = [torch.from_numpy(slot) for slot in host_slots]
        self._on_host = page_table.device.type == "cpu"
        self._pinned = words if self._on_host else [pin(tensor) for tensor in words]
        self._device = words if self._on_host else [tensor.to(page_table.device) for tensor in words]
        self._next = 0

    @property
    def next_slot(self) -> int:
        """The slot that the coming step must be packed into."""
        return self._next

    def load(self, step_id: int) -> BatchMetadata:
        """Views of the step just packed into `next_slot`; applies its new pages to the page table."""
        index, self._next = self._next, 1 - self._next
        host = self._host[index]
        words = host[:HEADER_WORDS].tolist()
        header = {name: words[word] for name, word in HEADER.items()}
        if header["magic"] != MAGIC:
            raise StaleStepError(f"packed slot {index} holds no batch: magic {header['magic']:#x}, expected {MAGIC:#x}")
        device = self._device[index]
        if not self._on_host:
            num_words = header["num_words"]
            device[:num_words].copy_(self._pinned[index][:num_words], non_blocking=True)
        spans = section_spans(words)
        views = dict(zip(SECTIONS, _split(device, spans), strict=True))
        host_sections = HostSections(host, spans)
        if header["num_new_pages"]:
            update_page_table(
                self._page_table, views["new_page_slots"], views["new_page_indices"], views["new_page_ids"]
            )
        fields: dict[str, Any] = {name: header[name] for name in _BATCH_COUNTS}
        fields |= {name: views[name] for name in _BATCH_TENSORS}
        return BatchMetadata(
            step_id=step_id,
            num_drafts=header["num_draft_tokens"],
            page_table=self._page_table,
            host=host_sections,
            admitted=_admitted(host_sections) if header["num_admitted"] else [],
            **fields,
        )


class HostSections(Mapping[str, np.ndarray]):
    """Sections of a packed slot on the host, int32 views made when asked for; valid for the step."""

    def __init__(self, slot: np.ndarray, spans: list[tuple[int, int]]) -> None:
        self._slot = slot
        self._spans = spans

    def __getitem__(self, name: str) -> np.ndarray:
        start, end = self._spans[_SECTION_INDEX[name]]
        return self._slot[start:end]

    def __iter__(self) -> Iterator[str]:
        return iter(SECTIONS)

    def __len__(self) -> int:
        return len(SECTIONS)


def section_spans(words: list[int]) -> list[tuple[int, int]]:
    """Half-open word ranges of every section, in order, from the header's words."""
    return [
        (start, start + factor * words[count] + extra)
        for start, (count, factor, extra) in zip(words[SECTION_OFFSETS_AT:], _SECTION_LENGTHS, strict=False)
    ]


def _split(words: torch.Tensor, spans: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Views of all spans, which are in order and do not overlap; one call for all of them."""
    sizes: list[int] = []
    at = 0
    for start, end in spans:
        sizes += (start - at, end - start)
        at = end
    sizes.append(words.shape[0] - at)
    return list(words.split(sizes)[1::2])


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Registers the planner's own memory with CUDA, so that the copy of a step is asynchronous."""
    result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(result) != 0:
        raise ConfigError(
            f"cannot pin {tensor.nbytes} bytes of host memory (CUDA error {int(result)}); raise ulimit -l"
        )
    return tensor


def _admitted(host: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
    ids = np.ascontiguousarray(host["admitted_ids"]).view(np.int64)
    return list(zip(host["admitted_slots"].tolist(), ids.tolist(), strict=True))
