"""`Ops` in plain torch: any device, any dtype, rounding where transformers' Llama and Qwen modules round.

Batch-invariant mode. A row's result must not depend, bit for bit, on which rows are computed with it or on how
many there are. Library kernels choose their loop order by shape, so every call here has a shape that does not
depend on the batch: matrix products run on blocks of `block_rows` rows, the last one padded with zeros, and
element-wise functions whose vector and scalar code differ in the last bit (exp) run a row at a time on a CPU.
A block is right only if a row's result does not depend on its place in the block or on its neighbours: each
shape is checked for that when the layer is built, and a shape that fails runs a row at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

_CPU_BLOCK_ROWS = 8
_CUDA_BLOCK_ROWS = 64  # a tile of the matrix units, so that a decode step pays one tile


class TorchLinear:
    """x W^T (+ b) in x's dtype; cast to `out_dtype` afterwards when given."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias, self._out_dtype = weight, bias, out_dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self._weight, self._bias)
        return y if self._out_dtype is None else y.to(self._out_dtype)


class BlockedLinear(TorchLinear):
    """`TorchLinear` in calls of exactly `block_rows` rows."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None, block_rows: int
    ) -> None:
        super().__init__(weight, bias, out_dtype)
        self.block_rows = block_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return in_blocks(super().__call__, x, self.block_rows)


def in_blocks(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, block_rows: int) -> torch.Tensor:
    """Applies a row-wise function to x [T, ...] in calls of exactly `block_rows` rows, zeros below the last row.

    Every call gets a buffer of its own, so that its alignment does not depend on the batch either.
    """
    num_rows = x.shape[0]
    outputs = []
    for start in range(0, num_rows, block_rows):
        rows = x[start : start + block_rows]
        block = x.new_zeros((block_rows, *x.shape[1:]))
        block[: rows.shape[0]] = rows
        outputs.append(function(block)[: rows.shape[0]])
    if not outputs:
        return function(x.new_zeros((block_rows, *x.shape[1:])))[:0]
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


class TorchOps:
    """See the module's docstring; the protocol is `layers.base.Ops`."""

    def __init__(self, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant
        self._block_rows: dict[tuple[object, ...], int] = {}  # what each shape was found to stand

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
    ) -> TorchLinear:
        """weight [out, in], bias [out] or None. `out_dtype` casts the product, which is rounded to x's dtype first."""
        weight = weight.contiguous()
        if not self.batch_invariant:
            return TorchLinear(weight, bias, out_dtype)
        key = (tuple(weight.shape), weight.dtype, weight.device, bias is None)
        if key not in self._block_rows:
            self._block_rows[key] = _invariant_block_rows(weight, bias)
        return BlockedLinear(weight, bias, out_dtype, self._block_rows[key])

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not self.batch_invariant:
            return _rms_norm(x, weight, eps)
        return in_blocks(lambda block: _rms_norm(block, weight, eps), x, _default_block_rows(x))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual  # one IEEE addition an element: the same bits in any batch
        return self.rms_norm(total, weight, eps), total

    def rope(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """Products and their sum are each rounded to q's dtype, as in transformers; invariant as it stands."""
        table = cos_sin.index_select(0, positions).to(q.dtype)  # [T, 2, D/2]
        cos, sin = table[:, None, 0], table[:, None, 1]  # [T, 1, D/2]
        _rotate(q, cos, sin)
        _rotate(k, cos, sin)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not self.batch_invariant:
            return _silu_and_mul(gate_up)
        block_rows = 1 if gate_up.device.type == "cpu" else _default_block_rows(gate_up)
        return in_blocks(_silu_and_mul, gate_up, block_rows)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    rotated_first = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(rotated_first)


def _silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _default_block_rows(x: torch.Tensor) -> int:
    return _CPU_BLOCK_ROWS if x.device.type == "cpu" else _CUDA_BLOCK_ROWS


def _invariant_block_rows(weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    """The default block if the library computes each of its rows alike, whatever the neighbours; else 1."""
    block_rows = _default_block_rows(weight)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((block_rows, weight.shape[1]), generator=generator).to(weight.device, weight.dtype)
    expected = F.linear(x, weight, bias)
    for shift in range(1, block_rows):
        if not torch.equal(F.linear(x.roll(shift, 0), weight, bias), expected.roll(shift, 0)):
            return 1
    alone = torch.zeros_like(x)
    alone[0] = x[0]
    return block_rows if torch.equal(F.linear(alone, weight, bias)[0], expected[0]) else 1
