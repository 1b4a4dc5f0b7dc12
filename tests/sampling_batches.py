"""Batches of sampled rows made by hand: what sampling and verification read of a packed step, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from sonar_engine.sampling.state import SamplingState
from sonar_engine.step_buffers import SECTIONS, BatchMetadata
from sonar_engine.types import SamplingParams

NO_TOKENS = np.zeros(0, np.int32)


def sampled_batch(
    slots: Sequence[int],
    drafts: Sequence[int],
    output_pos: Sequence[int],
    sampling: Sequence[bool] | None = None,
    num_decode_reqs: int | None = None,
) -> BatchMetadata:
    """Rows with `drafts[r]` drafts each; where `sampling` is false, a chunk that stops before the prompt's end."""
    num_reqs = len(slots)
    samples = [count + 1 if sampling is None or sampling[r] else 0 for r, count in enumerate(drafts)]
    indptr = np.concatenate([[0], np.cumsum(samples)]).astype(np.int32)
    arrays = {
        "slots": np.array(slots, np.int32),
        "num_draft_tokens": np.array(drafts, np.int32),
        "output_pos": np.array(output_pos, np.int32),
        "sample_indptr": indptr,
        "sample_reqs": np.repeat(np.arange(num_reqs), samples).astype(np.int32),
    }
    host = {name: arrays.get(name, NO_TOKENS) for name in SECTIONS}
    tensors = {name: torch.from_numpy(values) for name, values in host.items()}
    unused = ("new_page_slots", "new_page_indices", "new_page_ids", "admitted_slots", "admitted_ids")
    return BatchMetadata(
        step_id=0,
        num_reqs=num_reqs,
        num_decode_reqs=num_reqs if num_decode_reqs is None else num_decode_reqs,
        num_tokens=int(indptr[-1]),
        num_decode_tokens=int(indptr[-1]),
        num_drafts=sum(drafts),
        max_draft_tokens=max(drafts, default=0),
        max_q_len=max(drafts, default=0) + 1,
        max_kv_len=1,
        num_sample_rows=int(indptr[-1]),
        page_table=torch.zeros((1, 1), dtype=torch.int32),
        host=host,
        admitted=[],
        **{name: tensor for name, tensor in tensors.items() if name not in unused},
    )


def sampling_state(
    params: Sequence[SamplingParams],
    vocab_size: int,
    *,
    eos_token_ids: Sequence[int] = (),
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    seeds: Sequence[int] | None = None,
    max_num_seqs: int | None = None,
) -> SamplingState:
    """A state whose slot i holds params[i], all with the same history; `seeds` stand in where the user gave none."""
    state = SamplingState(max_num_seqs or len(params), vocab_size, "cpu", eos_token_ids)
    for slot, each in enumerate(params):
        seed = 1000 + slot if seeds is None else seeds[slot]
        state.admit(slot, each, np.array(prompt, np.int32), np.array(output, np.int32), params_seed=seed)
    return state
