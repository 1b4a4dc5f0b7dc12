"""What is handed to FlashInfer, on a CPU: its wrappers are played by `fake_flashinfer`."""

from __future__ import annotations

import sys
from typing import Any

import fake_flashinfer
import pytest
import torch
from batches import BatchRow, PagedBatches
from sonar_engine.attention.flashinfer_attention import _PLANS_AHEAD, FlashInferAttention, _Turns, split_kv_bytes
from sonar_engine.fixed_batch import FixedBatch
from sonar_engine.step_buffers import BatchMetadata
from test_attention import MODEL, PlainAttention, _check
from test_cuda_graphs import padded_cache

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, MODEL.num_kv_heads, MODEL.head_dim


class FakeEvent:
    log: list[tuple[str, int]]  # (what, number of the event)

    def __init__(self) -> None:
        self.number = len({number for _, number in self.log})
        self.log.append(("made", self.number))

    def record(self) -> None:
        self.log.append(("recorded", self.number))

    def synchronize(self) -> None:
        self.log.append(("waited", self.number))


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is done with events."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module())
    monkeypatch.setattr(FakeEvent, "log", [], raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return FakeEvent.log


@pytest.mark.parametrize("window", [None, 13])
def test_batches_of_any_kind_are_planned_right(window: int | None) -> None:
    _check(lambda caches, scale, window: FlashInferAttention(caches, 6, scale, window), torch.float32, window=window)


class _Steps:
    """A FlashInferAttention over fixed batches of 4 rows beside the plain reference."""

    def __init__(self) -> None:
        self.cache = padded_cache(num_pages=40, page_size=4, max_num_seqs=5)
        self.batches = PagedBatches(num_pages=40, page_size=4, max_num_seqs=5, max_pages=16)
        self.batches.page_table = self.cache.page_table
        self.attention = FlashInferAttention(self.cache.layers, NUM_HEADS, 0.25)
        self.plain = PlainAttention(0.25, None)

    def qkv(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        qkv = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        return qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)

    def check(self, padded: BatchMetadata, batch: BatchMetadata, first: Any = None) -> None:
        """`first` stands for the graph: the step in which its kernels were captured."""
        q, k, v = self.qkv(padded.num_tokens)
        if first is not None:
            self.attention._step = first
        got = self.attention.forward(0, q, k, v)[: batch.num_tokens]
        real = slice(batch.num_tokens)
        expected = self.plain.forward(batch, q[real], k[real], v[real])
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("q_len", [1, 3])
def test_kernels_captured_once_run_by_the_plan_of_every_later_batch(q_len: int) -> None:
    steps = _Steps()
    prompts = steps.batches.build([BatchRow(slot, 0, [0] * (5 + slot)) for slot in range(5)])
    steps.attention.begin(prompts)
    steps.check(prompts, prompts)
    fixed = FixedBatch(4, q_len, steps.cache)
    steps.attention.begin(fixed.fill(None))
    captured = steps.attention._step
    computed = {slot: 5 + slot for slot in range(5)}
    # More batches than there are wrappers of the shape.
    for slots in ([4, 0, 2], [1, 2, 3, 4], [3], [0, 4], [2, 1, 0]):
        batch = steps.batches.build([BatchRow(slot, computed[slot], [0] * q_len, True) for slot in slots])
        padded = fixed.fill(batch)
        steps.attention.begin(padded)
        steps.check(padded, batch, captured)
        computed |= {slot: computed[slot] + q_len for slot in slots}


def test_a_plan_is_not_made_over_one_that_the_device_has_not_taken(log: list[tuple[str, int]]) -> None:
    class Wrapper:
        def plan(self, number: int) -> None:
            log.append(("planned", number))

    turns = _Turns(Wrapper)
    log.clear()
    wrappers = [turns.plan(number) for number in range(_PLANS_AHEAD + 1)]
    assert len(set(map(id, wrappers))) == _PLANS_AHEAD
    assert wrappers[0] is wrappers[-1]
    assert log[:3] == [("waited", 0), ("planned", 0), ("recorded", 0)]
    assert log[-3:] == [("waited", 0), ("planned", _PLANS_AHEAD), ("recorded", 0)]


def test_room_for_partial_results_is_that_of_flashinfers_own_plan() -> None:
    """Worked by hand from `PrefillPlan`: blocks of query tiles, each with a fp32 output and a scale a head."""
    model = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_sms": 132}
    # 4 packed queries a row are one tile of 16; 2 * 132 / 8 blocks are more than 8 tiles.
    assert split_kv_bytes(8, 1, **model) == 32 * 33 * 16 * 129 * 4
    # Up to 257 tokens in one row: tiles of 128, 10 full ones and 63 that are begun.
    assert split_kv_bytes(64, 5, **model) == 32 * 73 * 128 * 129 * 4
