"""The tokens of every running request, by slot, on the device: what a drafter reads when it runs on its own."""

from __future__ import annotations

import numpy as np
import torch

from sonar_engine.device import to_device
from sonar_engine.drafters.base import Verdict
from sonar_engine.step_buffers import BatchMetadata


class TokenHistory:
    """`tokens` int32 [max_num_seqs, most positions of a sequence]. A row is valid up to its sequence's length.

    Beyond it lies junk of earlier tenants and rejected drafts. Every id is below `vocab_size`, so that the drafter can
    embed it: ids in the padding of a wider target, which stand for nothing, become the last one.
    """

    def __init__(self, max_num_seqs: int, num_positions: int, vocab_size: int, device: torch.device) -> None:
        """`num_positions` covers the longest sequence and one verdict beyond it."""
        self._last_id = vocab_size - 1
        self.tokens = torch.zeros((max_num_seqs, num_positions), dtype=torch.int32, device=device)

    def admit(self, slot: int, tokens: np.ndarray) -> None:
        """A request with these prompt and output tokens entered `slot`."""
        self.tokens[slot, : len(tokens)] = torch.from_numpy(np.minimum(tokens, self._last_id)).to(self.tokens.device)

    def append(self, batch: BatchMetadata, verdict: Verdict) -> None:
        """Writes what the rows of `batch` emitted behind the tokens known when it was planned."""
        samples = np.diff(batch.host["sample_indptr"]) > 0  # other rows still have prompt tokens there
        rows: slice | torch.Tensor = slice(None)
        if not samples.all():
            rows = to_device(np.flatnonzero(samples), self.tokens.device)
        known = (batch.kv_len - batch.num_draft_tokens)[rows]
        emitted = verdict.tokens[rows]
        positions = known[:, None] + torch.arange(emitted.shape[1], device=self.tokens.device)
        self.tokens[batch.slots[rows][:, None], positions] = emitted.clamp(0, self._last_id)
