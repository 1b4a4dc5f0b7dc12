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


class PromptLookup:
    """What followed the last tokens of each sequence when they occurred before, from the scheduler's token history.

    The longest match of the last n tokens, n in [prompt_lookup_min, prompt_lookup_max], wins; among equally long
    ones the most recent. The look-up costs the same however long the history is.
    """

    def __init__(self, scheduler: Scheduler, config: SpeculativeConfig, max_num_seqs: int) -> None:
        self._scheduler = scheduler
        self._config = config
        self.tokens = np.zeros((max_num_seqs, config.num_speculative_tokens), np.int32)  # by slot
        self.lens = np.zeros(max_num_seqs, np.int32)  # by slot, how many there are

    def find(self) -> bool:
        """Looks up all decoding sequences, before a step is planned. Whether anything was found."""
        config = self._config
        return (
            self._scheduler.propose_ngram(
                config.num_speculative_tokens,
                config.prompt_lookup_min,
                config.prompt_lookup_max,
                self.tokens,
                self.lens,
            )
            > 0
        )


class NgramDrafter:
    """Drafts of a `PromptLookup`, found on the host before the step is planned. They are one-hot."""

    needs_hidden: Literal["none"] = "none"
    runs_on: Literal["leader"] = "leader"
    kv_layers = 0

    def __init__(self, lookup: PromptLookup, device: torch.device) -> None:
        self._lookup = lookup
        self._device = device

    @classmethod
    def build(cls, context: DrafterContext) -> NgramDrafter:
        config = context.config
        lookup = PromptLookup(context.scheduler, config.speculative, config.max_num_seqs)
        return cls(lookup, context.runner.device)

    def draft_lens(self) -> np.ndarray | None:
        return self._lookup.lens if self._lookup.find() else None

    def propose(self, batch: BatchMetadata) -> Draft | None:
        if batch.num_drafts == 0:
            return None
        decode_slots = batch.host["slots"][: batch.num_decode_reqs]
        tokens = self._lookup.tokens[decode_slots, : batch.max_draft_tokens]  # [D, K]
        return Draft(to_device(tokens, self._device))

    def ingest(self, batch: BatchMetadata, hidden: torch.Tensor, verdict: Verdict) -> None:
        pass

    def admit(self, slot: int, request_id: int, speculate: int) -> None:
        self._lookup.lens[slot] = 0
