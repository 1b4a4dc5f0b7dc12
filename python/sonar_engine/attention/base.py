"""The interface of paged attention. Implementations: `torch_attention`, `native_attention`, `flashinfer_attention`."""

from __future__ import annotations

from typing import Protocol

import torch

from sonar_engine.step_buffers import BatchMetadata


class Attention(Protocol):
    """Causal attention of a batch over the paged KV cache, all layers of one model."""

    def begin(self, batch: BatchMetadata) -> None:
        """Once a step, before layer 0: derive what every layer shares (page table rows, plan)."""
        ...

    def can_capture(self, num_rows: int, q_len: int) -> bool:
        """Whether what `forward` queues for a batch that `is_fixed`, with rows of `q_len` tokens each, is the same for
        all of them, so that it can be captured once; `begin` then brings each batch's own lengths and pages over."""
        ...

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes k, v [T, Hkv, D] at `batch.slot_mapping`, then attends.

        Token t of row r sees keys at positions 0..positions[t] of that row (a window, when the model has one,
        keeps the last `window` of them). q [T, Hq, D] -> [T, Hq * D] in q's dtype. q, k, v may be strided views.
        """
        ...
