"""Plain decoding: the drafter that proposes nothing."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from sonar_engine.drafters.base import Draft, Verdict
from sonar_engine.step_buffers import BatchMetadata


class PlainDrafter:
    """Every step verifies zero drafts, which is ordinary decoding."""

    needs_hidden: Literal["none"] = "none"
    runs_on: Literal["leader"] = "leader"
    kv_layers = 0

    def draft_lens(self) -> np.ndarray | None:
        return None

    def propose(self, batch: BatchMetadata) -> Draft | None:
        return None

    def ingest(self, batch: BatchMetadata, hidden: torch.Tensor, verdict: Verdict) -> None:
        pass

    def admit(self, slot: int, request_id: int, speculate: int) -> None:
        pass
