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


def accept_coins(seeds: Seeds, positions: torch.Tensor) -> torch.Tensor:
    """fp32 in [0, 1), one for each output position: positions int32 [N, K] of N seeds -> [N, K]."""
    purpose = seeds.for_purpose(ACCEPT)
    zero = torch.zeros((), dtype=torch.int32, device=positions.device)
    return coins.uniform(zero, purpose.lo[:, None], purpose.hi[:, None], positions)
