"""A small scheduler through its bindings, and the calls of a step with what its tests always pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sonar_engine import step_buffers
from sonar_engine._scheduler import Events, Scheduler

Array = npt.NDArray[np.int32]


def make(**options: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "page_size": 4,
        "num_pages": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "vocab_size": 100,
        "max_waiting": 16,
        "enable_prefix_caching": True,
        "num_speculative_tokens": 3,
        "eos_token_ids": np.array([2], np.int32),
        "cache_key": b"k" * 32,
    }
    return Scheduler(**(settings | options))


def ids(*tokens: int) -> Array:
    return np.array(tokens, np.int32)


def section(words: Array, name: str) -> Array:
    """A section of a packed step, cut by the layout that `step_buffers` states."""
    at = step_buffers.SECTIONS.index(name)
    header = step_buffers.HEADER
    rows, tokens, samples = (int(words[header[key]]) for key in ("num_reqs", "num_tokens", "num_sample_rows"))
    pages, admitted = int(words[header["num_new_pages"]]), int(words[header["num_admitted"]])
    per_row = dict.fromkeys(("qo_indptr", "paged_kv_indptr", "sample_indptr"), rows + 1)
    per_token = dict.fromkeys(("token_ids", "positions", "slot_mapping", "token_reqs"), tokens)
    others = {"sample_rows": samples, "sample_reqs": samples, "admitted_slots": admitted, "admitted_ids": 2 * admitted}
    per_page = dict.fromkeys(("new_page_slots", "new_page_indices", "new_page_ids"), pages)
    start = int(words[step_buffers.SECTION_OFFSETS_AT + at])
    return words[start : start + (per_row | per_token | others | per_page).get(name, rows)]


def plan(scheduler: Scheduler, slot: int = 0, drafts: int = 0) -> int:
    lens = np.full(8, drafts, np.int32) if drafts else None
    step = scheduler.plan(slot, lens)
    assert step is not None
    return step


def commit(scheduler: Scheduler, step: int, slot: int = 0, token: int = 5, accepted: int = 0) -> Events:
    """Commits with `accepted` drafts and one token more in every sampling row."""
    words = scheduler.slot(slot)
    samples = np.diff(section(words, "sample_indptr"))
    emitted = np.minimum(samples, accepted + 1).astype(np.int32)
    return scheduler.commit(step, emitted, np.full((len(samples), accepted + 1), token, np.int32))


def run_step(scheduler: Scheduler, token: int = 5) -> Events:
    return commit(scheduler, plan(scheduler), token=token)


def assert_idle(scheduler: Scheduler) -> None:
    stats = scheduler.stats()
    assert not scheduler.has_work()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
    scheduler.check_integrity()
