"""Choosing draft tokens from a draft's logits, with the settings of the requests they are for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sonar_engine._scheduler import CpuKernels
from sonar_engine.device import to_device
from sonar_engine.sampling.coins import Seeds, draft_seeds
from sonar_engine.sampling.sampler import Sampler
from sonar_engine.sampling.state import SAMPLED, SEEDED, SamplingState

_LARGEST = 1e6  # believable logit


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

    Logits are [N, W]: of the target's ids, or of the draft's own, fewer ones. Tokens are the target's ids always.
    A draft whose weights are damaged or whose dtype overflows gives rows of logits that are no numbers: then any token
    is drawn alike, since a draft is verified by the probability it was drawn with, and that must be one.
    """

    def __init__(
        self, state: SamplingState, kernels: CpuKernels | None = None, token_map: torch.Tensor | None = None
    ) -> None:
        """`kernels` as for `Sampler`; `token_map` as in `Draft`."""
        self._state = state
        self._token_map = token_map
        self._sampler = Sampler(state.device, kernels)

    def draws(self, slots: np.ndarray) -> np.ndarray:
        """Of which of these slots verification needs the drafts' probabilities, bool [N]."""
        is_drawn: np.ndarray = (self._state.uses[slots] & (SAMPLED | SEEDED)) == SAMPLED
        return is_drawn

    def choose(self, logits: torch.Tensor, slots: np.ndarray, output_pos: np.ndarray, step: int) -> torch.Tensor:
        """logits fp32 [N, W] of the rows of `slots` int [N] -> each row's draft number `step`, int32 [N].

        output_pos int [N] is the output position of draft 0; it grows from step to step of a request.
        """
        uses = self._state.uses[slots]
        all_uses = int(np.bitwise_or.reduce(uses, initial=0))
        if not all_uses & SAMPLED:
            return self._as_target_ids(self._sampler.greedy(logits))
        is_seeded = (uses & SEEDED) > 0
        logits = _sane(logits)
        rows = self._rows(slots, all_uses, is_seeded, output_pos, step)
        if self._token_map is None or not is_seeded.any():
            return self._as_target_ids(self._sampler.sample(logits, rows))
        # Noise belongs to the target's ids, so it must meet them.
        wide = logits.new_full((logits.shape[0], self._state.vocab_size), -torch.inf)
        wide[:, self._token_map] = logits
        return self._sampler.sample(wide, rows)

    def _rows(
        self, slots: np.ndarray, all_uses: int, is_seeded: np.ndarray, output_pos: np.ndarray, step: int
    ) -> _Rows:
        state = self._state
        index = to_device(slots, state.device)
        positions = to_device((output_pos + step * is_seeded).astype(np.int32), state.device)
        own = Seeds(state.seed_lo[index], state.seed_hi[index])
        fresh, coupled = draft_seeds(own, step), to_device(is_seeded, state.device)
        seeds = Seeds(torch.where(coupled, own.lo, fresh.lo), torch.where(coupled, own.hi, fresh.hi))
        return _Rows(all_uses, state.inv_temperature[index], seeds, positions)

    def _as_target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self._token_map is None else self._token_map[tokens]

    def probs(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """The distribution that `choose` draws from, fp32 [N, W]; meaningless in rows of greedy requests."""
        index = to_device(slots, self._state.device)
        return (_sane(logits) * self._state.inv_temperature[index, None]).softmax(dim=1)


def _sane(logits: torch.Tensor) -> torch.Tensor:
    """[N, W] -> the same, but zeros in rows whose largest logit is no number or too large for noise to matter."""
    is_sane = logits.amax(dim=1, keepdim=True).abs() <= _LARGEST  # false for NaN
    return logits.where(is_sane, 0.0)
