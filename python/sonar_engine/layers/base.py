"""What a model is made of: the operations that have more than one implementation.

`torch_ops.TorchOps` runs on any device; `native.NativeOps` runs the Rust CPU kernels. Both give the same
numbers within rounding; `NativeOps` is batch-invariant by construction.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Linear(Protocol):
    """y = x W^T (+ b). `in_features`, `out_features` are the logical sizes."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [T, in] -> [T, out], x's dtype
        ...


class Ops(Protocol):
    """Element-wise and row-wise operations of a decoder layer. T = tokens of the batch."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None) -> Linear:
        """Takes weight [out, in] (and may keep a packed copy alone); bias [out] or None; None: x's dtype out."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., H] -> x / rms(x) * weight, computed in fp32, returned in x's dtype."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (rms_norm(x + residual), x + residual); may write the sum into `residual`."""
        ...

    def rope(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """Rotates q [T, Hq, D] and k [T, Hkv, D] in place (half-split pairs, as in Hugging Face's Llama).

        positions int32 [T]; cos_sin fp32 [max_positions, 2, D/2] (index 0 cos, 1 sin, scaling included).
        """
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 I] (gate first) -> silu(gate) * up [T, I]."""
        ...
