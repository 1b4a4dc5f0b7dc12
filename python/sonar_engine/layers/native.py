"""The operations of a decoder layer on the Rust CPU kernels (crate `sonar-cpu`).

Every output element is a fixed sequence of fp32 operations, so results do not depend, bit for bit, on how many rows
a call has or on the number of threads.
"""

from __future__ import annotations

from typing import Literal

import torch

from sonar_engine._scheduler import CpuKernels, CpuWeight
from sonar_engine.errors import ConfigError

Quantization = Literal["none", "int8", "int4"]
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def dtype_code(dtype: torch.dtype) -> int:
    """The kernels' number of a dtype; `ConfigError` for one they do not have."""
    code = DTYPE_CODES.get(dtype)
    if code is None:
        raise ConfigError(f"the native CPU kernels do not have {dtype}: use float32, bfloat16 or float16")
    return code


QUANT_GROUP = 32  # input features that share a scale


class NativeLinear:
    """y = x W^T (+ b) over weights packed once; the weight tensor itself is not kept.

    Each output is one fp32 chain over the input features, rounded once to `out_dtype` (None: x's dtype). With `bits` 4
    or 8 the weights are quantised in groups of 32 input features, and so is x, row by row in eight bits; a group's
    products are summed exactly.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        *,
        bits: int = 0,
    ) -> None:
        if weight.dim() != 2 or weight.device.type != "cpu":
            raise ConfigError(f"a weight must be a [out, in] matrix on the CPU, not {list(weight.shape)}")
        self.out_features, self.in_features = weight.shape
        if bias is not None and list(bias.shape) != [self.out_features]:
            raise ConfigError(f"a bias of shape {list(bias.shape)} does not fit {self.out_features} outputs")
        self.out_dtype = out_dtype
        self._kernels = kernels
        weight = weight.detach().contiguous()
        wide_bias = None if bias is None else bias.detach().float().contiguous()
        self._weight: CpuWeight = kernels.pack(
            weight.data_ptr(),
            weight.stride(0),
            self.out_features,
            self.in_features,
            dtype_code(weight.dtype),
            0 if wide_bias is None else wide_bias.data_ptr(),
            bits,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight."""
        return self._weight.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [..., in] -> [..., out]
        if x.shape[-1] != self.in_features:
            raise ConfigError(f"an input of {x.shape[-1]} features does not fit a weight of {self.in_features}")
        out_dtype = self.out_dtype or x.dtype
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, self.in_features).contiguous()
        y = torch.empty((rows.shape[0], self.out_features), dtype=out_dtype)
        self._kernels.linear(
            self._weight,
            rows.shape[0],
            rows.data_ptr(),
            rows.stride(0),
            dtype_code(x.dtype),
            y.data_ptr(),
            self.out_features,
            dtype_code(out_dtype),
        )
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)


class NativeOps:
    """Implements `layers.base.Ops` for CPU tensors of float32, bfloat16 and float16."""

    def __init__(
        self, num_threads: int | None = None, *, force_scalar: bool = False, quantization: Quantization = "none"
    ) -> None:
        """`quantization` of the weights; with `int4` a head, whose outputs are logits, has eight bits."""
        self._kernels = CpuKernels(num_threads or torch.get_num_threads(), force_scalar)
        self._quantization = quantization

    @property
    def kernels(self) -> CpuKernels:
        """The kernels and their thread team, to be shared with `NativeAttention`."""
        return self._kernels

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> NativeLinear:
        """A packed copy of weight [out, in]; `out_dtype` float32 keeps the logits of a head unrounded."""
        return NativeLinear(self._kernels, weight, bias, out_dtype, bits=self._bits(weight, out_dtype))

    def _bits(self, weight: torch.Tensor, out_dtype: torch.dtype | None) -> int:
        """0 for a matrix that cannot be cut into groups: it stays as it is."""
        if self._quantization == "none" or weight.shape[-1] % QUANT_GROUP:
            return 0
        return 4 if self._quantization == "int4" and out_dtype is None else 8

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., H] -> round(x / rms(x)) * weight: fp32, rounded to x's dtype before and after the scale."""
        y = torch.empty(x.shape, dtype=x.dtype)
        rows = _rows(x)
        self._norm(rows, None, weight, y, eps)
        return y

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual); the sum is written into `residual`."""
        y = torch.empty(x.shape, dtype=x.dtype)
        rows, sums = _rows(x), _rows(residual)
        if sums.data_ptr() != residual.data_ptr() or residual.dtype != x.dtype:
            raise ConfigError("the residual must have adjacent columns and the dtype of x")
        self._norm(rows, sums, weight, y, eps)
        return y, residual

    def _norm(
        self, rows: torch.Tensor, sums: torch.Tensor | None, weight: torch.Tensor, y: torch.Tensor, eps: float
    ) -> None:
        count, width = rows.shape
        if weight.dtype != rows.dtype:
            weight = weight.to(rows.dtype)
        self._kernels.rms_norm(
            count,
            width,
            dtype_code(rows.dtype),
            rows.data_ptr(),
            rows.stride(0),
            0 if sums is None else sums.data_ptr(),
            0 if sums is None else sums.stride(0),
            weight.data_ptr(),
            y.data_ptr(),
            width,
            eps,
        )

    def rope(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """Rotates q [T, Hq, D] and k [T, Hkv, D] in place, in fp32, rounded once to their dtype."""
        tokens, num_q_heads, head_dim = q.shape
        if q.stride(1) != head_dim or k.stride(1) != head_dim or q.stride(2) != 1 or k.stride(2) != 1:
            raise ConfigError("the heads of a token must lie side by side to be rotated in place")
        self._kernels.rope(
            tokens,
            head_dim,
            dtype_code(q.dtype),
            q.data_ptr(),
            q.stride(0),
            num_q_heads,
            k.data_ptr(),
            k.stride(0),
            k.shape[1],
            positions.data_ptr(),
            cos_sin.data_ptr(),
        )

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 I] (gate first) -> silu(gate) * up [T, I]."""
        rows = _rows(gate_up)
        count, width = rows.shape[0], rows.shape[1] // 2
        y = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype)
        self._kernels.silu_and_mul(
            count, width, dtype_code(rows.dtype), rows.data_ptr(), rows.stride(0), y.data_ptr(), width
        )
        return y


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as a matrix with adjacent columns, copied only when it is not one."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    return x.contiguous().view(-1, x.shape[-1])
