"""N-gram lookup: propose what followed the last tokens when they occurred before (prompt lookup decoding,
Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from sonar_engine.device import to_device
from sonar_engine.drafters.base import Draft, Verdict
from sonar_engine.step_buffers import BatchMetadata

if TYPE_CHECKING:
    from sonar_engine._scheduler import Scheduler
    from sonar_engine.config import SpeculativeConfig
    from sonar_engine.drafters.registry import DrafterContext


class NgramDrafter:
    """Drafts come from the scheduler's own token history, on the host, before the step is planned.

    The longest match of the last n tokens, n in [prompt_lookup_min, prompt_lookup_max], wins; among equally long
    ones the most recent. Drafts are one-hot. The look-up costs the same however long the history is.
    """

    needs_hidden: Literal["none"] = "none"
    runs_on: Literal["leader"] = "leader"
    kv_layers = 0

    def __init__(
        self, scheduler: Scheduler, config: SpeculativeConfig, max_num_seqs: int, device: torch.device
    ) -> None:
        self._scheduler = scheduler
        self._config = config
        self._device = device
        self._tokens = np.zeros((max_num_seqs, config.num_speculative_tokens), np.int32)  # by slot
        self._lens = np.zeros(max_num_seqs, np.int32)  # by slot

    @classmethod
    def build(cls, context: DrafterContext) -> NgramDrafter:
        config = context.config
        return cls(context.scheduler, config.speculative, config.max_num_seqs, context.runner.device)

    def draft_lens(self) -> np.ndarray | None:
        config = self._config
        found = self._scheduler.propose_ngram(
            config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max, self._tokens, self._lens
        )
        return self._lens if found else None

    def propose(self, batch: BatchMetadata) -> Draft | None:
        if batch.num_drafts == 0:
            return None
        decode_slots = batch.host["slots"][: batch.num_decode_reqs]
        tokens = self._tokens[decode_slots, : batch.max_draft_tokens]  # [D, K]
        return Draft(to_device(tokens, self._device))

    def ingest(self, batch: BatchMetadata, hidden: torch.Tensor, verdict: Verdict) -> None:
        pass

    def admit(self, slot: int, request_id: int, speculate: int) -> None:
        self._lens[slot] = 0
