"""Choosing draft tokens from a draft model's logits, with the settings of the requests they are for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sonar_engine._scheduler import CpuKernels
from sonar_engine.sampling.coins import DRAFT, Seeds
from sonar_engine.sampling.sampler import Sampler
from sonar_engine.sampling.state import SAMPLED, SEEDED, SamplingState


@dataclass(frozen=True)
class _Rows:
    """What `Sampler` reads of N rows."""

    all_uses: int
    inv_temperature: torch.Tensor  # fp32 [N], 0 = greedy
    seeds: Seeds
    positions: torch.Tensor  # int32 [N], what a coin is drawn for


class DraftSampler:
    """Greedy where the request is; else a draw from softmax(logits / temperature), without any other processing.

    A seeded request's target token is a function of its noise, so its draft takes the same noise: two models of
    similar distributions then mostly agree (Gumbel coupling, Daliri et al. 2025, arXiv 2408.07978). Other requests
    draw with coins of their own, independent of those that verification uses, and fresh in every step: whether a block
    is accepted may depend on all its drafts, so a later draft at the same position must not see a coin again.
    """

    def __init__(self, state: SamplingState, num_drafts: int, kernels: CpuKernels | None = None) -> None:
        """`num_drafts` is the most drafts of a step; `kernels` as for `Sampler`."""
        self._state = state
        self._num_drafts = num_drafts
        self._sampler = Sampler(state.device, kernels)

    def draws(self, slots: np.ndarray) -> bool:
        """Whether verification needs the drafts' probabilities for any of these slots."""
        return bool(((self._state.uses[slots] & (SAMPLED | SEEDED)) == SAMPLED).any())

    def choose(self, logits: torch.Tensor, slots: np.ndarray, output_pos: np.ndarray, step: int) -> torch.Tensor:
        """logits fp32 [N, V] of the rows of `slots` int [N] -> each row's draft number `step`, int32 [N].

        output_pos int [N] is the output position of draft 0; it grows from step to step of a request.
        """
        state, uses = self._state, self._state.uses[slots]
        positions = np.where(uses & SEEDED, output_pos + step, output_pos.astype(np.int64) * self._num_drafts + step)
        index = torch.from_numpy(slots).to(state.device)
        purpose = torch.from_numpy(np.where(uses & SEEDED, 0, DRAFT).astype(np.int32)).to(state.device)
        rows = _Rows(
            all_uses=int(np.bitwise_or.reduce(uses, initial=0)),
            inv_temperature=state.inv_temperature[index],
            seeds=Seeds(state.seed_lo[index], state.seed_hi[index] ^ purpose),
            positions=torch.from_numpy(positions.astype(np.int32)).to(state.device),
        )
        return self._sampler.sample(logits, rows)

    def probs(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """The distribution that `choose` draws from, fp32 [N, V]; meaningless in rows of greedy requests."""
        index = torch.from_numpy(slots).to(self._state.device)
        return (logits * self._state.inv_temperature[index, None]).softmax(dim=1)
