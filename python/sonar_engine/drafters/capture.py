"""The drafter that proposes nothing and hands on what the target saw: its final hidden states, for training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from sonar_engine.drafters.base import Draft, Verdict
from sonar_engine.drafters.registry import DrafterMethod
from sonar_engine.step_buffers import BatchMetadata

Sink = Callable[[int, int, torch.Tensor], None]
"""(request id, first position, states [N, H] of N positions; the tensor is the sink's own)"""


class CaptureDrafter:
    """Gives every row's states to `sink` after every step, some of them again after a preemption."""

    needs_hidden: Literal["last"] = "last"
    runs_on: Literal["leader"] = "leader"
    kv_layers = 0

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._owners: dict[int, int] = {}  # slot -> request id

    def draft_lens(self) -> np.ndarray | None:
        return None

    def propose(self, batch: BatchMetadata) -> Draft | None:
        return None

    def ingest(self, batch: BatchMetadata, hidden: torch.Tensor, verdict: Verdict) -> None:
        host = batch.host
        rows = zip(host["slots"].tolist(), host["num_computed_tokens"].tolist(), strict=True)
        indptr, on_host = host["qo_indptr"].tolist(), hidden.cpu()
        for row, (slot, first) in enumerate(rows):
            self._sink(self._owners[slot], first, on_host[indptr[row] : indptr[row + 1]].clone())

    def admit(self, slot: int, request_id: int, speculate: int) -> None:
        self._owners[slot] = request_id


def capturing(sink: Sink) -> DrafterMethod:
    """For `build_engine`. Prefix caching must be off: what is found in the cache is not computed, so not captured."""
    return DrafterMethod(lambda context: CaptureDrafter(sink), needs_hidden="last")
