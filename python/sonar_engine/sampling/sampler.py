"""Choosing one token a row: the target's own choice, a pure function of (seed, output position, processed logits)."""

from __future__ import annotations

from typing import Protocol

import torch
from sonar_kernels import gumbel_argmax

from sonar_engine._scheduler import CpuKernels
from sonar_engine.sampling.coins import Seeds
from sonar_engine.sampling.state import SAMPLED


class DrawnRows(Protocol):
    """What a draw reads of S rows."""

    @property
    def all_uses(self) -> int:
        """The rows' bits of `SamplingState.uses`, together."""
        ...

    @property
    def inv_temperature(self) -> torch.Tensor:
        """fp32 [S], 0 = greedy."""
        ...

    @property
    def seeds(self) -> Seeds:
        """[S] each."""
        ...

    @property
    def positions(self) -> torch.Tensor:
        """int32 [S], output positions."""
        ...


class Sampler:
    """Draws by Gumbel-max with counter-based coins: in Rust on the CPU, in Triton on a GPU.

    Both equal `sonar_kernels.gumbel.gumbel_argmax_torch` but for near-ties, where their logarithms round differently.
    """

    def __init__(self, device: torch.device, kernels: CpuKernels | None = None) -> None:
        """`kernels`: the CPU kernels whose threads to share; without them it brings its own."""
        on_cpu = device.type == "cpu"
        self._cpu_kernels = (kernels or CpuKernels(torch.get_num_threads())) if on_cpu else None

    def sample(self, logits: torch.Tensor, rows: DrawnRows) -> torch.Tensor:
        """Processed logits fp32 [S, V] -> int32 [S]: argmax if greedy, else a draw from softmax(logits / temperature).

        The lowest id wins ties.
        """
        if not rows.all_uses & SAMPLED:
            return self.greedy(logits)
        if self._cpu_kernels is None:
            return gumbel_argmax(logits, rows.inv_temperature, rows.seeds.lo, rows.seeds.hi, rows.positions)
        return self._draw(self._cpu_kernels, logits, rows.inv_temperature, rows.seeds, rows.positions.contiguous())

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """fp32 [S, V] -> int32 [S]: argmax."""
        if self._cpu_kernels is None:
            return logits.argmax(dim=1).to(torch.int32)
        zeros = torch.zeros(logits.shape[0])  # an inverse temperature of 0; seeds and positions are not read
        return self._draw(self._cpu_kernels, logits, zeros, Seeds(zeros, zeros), zeros)

    @staticmethod
    def _draw(
        kernels: CpuKernels,
        logits: torch.Tensor,
        inv_temperature: torch.Tensor,
        seeds: Seeds,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        logits = logits.float().contiguous()
        tokens = torch.empty(logits.shape[0], dtype=torch.int32)
        kernels.gumbel_argmax(
            logits.shape[0],
            logits.shape[1],
            logits.data_ptr(),
            logits.stride(0),
            inv_temperature.data_ptr(),
            seeds.lo.data_ptr(),
            seeds.hi.data_ptr(),
            positions.data_ptr(),
            tokens.data_ptr(),
        )
        return tokens
