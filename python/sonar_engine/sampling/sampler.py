"""Choosing one token a row: the target's own choice, a pure function of (seed, output position, processed logits)."""

from __future__ import annotations

import torch
from sonar_kernels import gumbel_argmax

from sonar_engine.sampling.state import SAMPLED, SampleRows


def sample(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    """Processed logits fp32 [S, V] -> int32 [S]: argmax if greedy, else a draw from softmax(logits / temperature)."""
    if not rows.all_uses & SAMPLED:
        return logits.argmax(dim=1).to(torch.int32)
    return gumbel_argmax(logits, rows.inv_temperature, rows.seeds.lo, rows.seeds.hi, rows.positions)
