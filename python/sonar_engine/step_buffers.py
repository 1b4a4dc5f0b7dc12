"""The packed step: one flat int32 buffer written by the planner, and the tensor views the device code reads.

The layout (header words and section order) is defined by `packed_batch.rs`; `SECTIONS` mirrors it and a test
pins both. Two slots alternate, so that a slot is never rewritten under a running copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

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
    host: dict[str, np.ndarray]  # every section on the host, by name (views of the slot; valid for this step)
    admitted: list[tuple[int, int]]  # (slot, request id) of requests that entered a slot with this step
