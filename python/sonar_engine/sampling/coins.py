"""Which coins belong to which decision: one seed a request, one purpose a decision, one position a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sonar_kernels import coins

# Mixed into the seed's high word. Coins of different purposes are independent; SAMPLE is the plain seed.
SAMPLE = 0
ACCEPT = 0x243F6A88
RECOVER = 0x13198A2E
DRAFT = 0x03707344


@dataclass(frozen=True)
class Seeds:
    """Seeds of N rows, int32 [N] each: the bits of the 64-bit seed's halves."""

    lo: torch.Tensor
    hi: torch.Tensor

    def rows(self, index: torch.Tensor) -> Seeds:
        return Seeds(self.lo[index], self.hi[index])

    def for_purpose(self, purpose: int) -> Seeds:
        return Seeds(self.lo, self.hi ^ purpose) if purpose else self


def split_seed(seed: int) -> tuple[int, int]:
    """The low and high words of a 64-bit seed (signed or not), each as a signed 32-bit integer."""
    words = seed & 0xFFFFFFFFFFFFFFFF
    lo, hi = words & 0xFFFFFFFF, words >> 32
    return lo - ((lo >> 31) << 32), hi - ((hi >> 31) << 32)


def accept_coins(seeds: Seeds, first_positions: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """fp32 in [0, 1), [N, K = num_drafts]: a coin for each draft of N rows, `first_positions` int32 [N] their first's.

    A coin belongs to (output position of the step's first draft, index of the draft), which no two steps share. A coin
    of the draft's own output position would come back in the next step after a rejection, and block verification has
    looked at it by then: the text's law would not be the target's.
    """
    purpose = seeds.for_purpose(ACCEPT)
    steps = torch.arange(num_drafts, dtype=torch.int32, device=first_positions.device)
    return coins.uniform(steps, purpose.lo[:, None], purpose.hi[:, None], first_positions[:, None])


def draft_seeds(seeds: Seeds, step: int) -> Seeds:
    """Seeds of the noise that draws draft `step` (from 0) of a chain.

    Always with the output position of the chain's first draft, the same for all its drafts: for the reason given in
    `accept_coins` no draft's noise may come back in a later step.
    """
    return seeds.for_purpose(DRAFT + (step << 24))
