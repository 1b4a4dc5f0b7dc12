"""Counter-based coins: every random number is a pure function of (seed, output position, id).

Integers are 32-bit and wrap; torch int32 holds their bits. The same function is written in Triton
(`triton_kernels.gumbel`) and in the CPU kernels of the engine; all three agree bit for bit in the integers.
"""

from __future__ import annotations

import torch


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


_ID_STEP = _signed(0x9E3779B9)
_POSITION_STEP = _signed(0x85EBCA6B)
_MIX_1 = 0x7FEB352D
_MIX_2 = _signed(0x846CA68B)
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser, in place. The masks make int32's arithmetic shifts logical."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    x.mul_(_MIX_1)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(_MIX_2)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def hash_words(
    ids: torch.Tensor, seed_lo: torch.Tensor, seed_hi: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Bits of a uint32 in int32; the int32 arguments broadcast against each other."""
    words = _mix(ids * _ID_STEP + seed_lo)
    words = _mix(words ^ seed_hi)
    return _mix(words + positions * _POSITION_STEP)


def _to_float(words: torch.Tensor) -> torch.Tensor:
    """The unsigned value, rounded to fp32."""
    return words.to(torch.int64).bitwise_and_(0xFFFFFFFF).to(torch.float32)


def uniform(ids: torch.Tensor, seed_lo: torch.Tensor, seed_hi: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """fp32 in [0, 1), with steps of 2**-32 near 0."""
    return _to_float(hash_words(ids, seed_lo, seed_hi, positions)).mul_(2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)


def exponential(
    ids: torch.Tensor, seed_lo: torch.Tensor, seed_hi: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """fp32 in (0, inf], of rate 1: argmax over ids of weight / exponential draws in proportion to weight."""
    return _to_float(hash_words(ids, seed_lo, seed_hi, positions)).add_(0.5).mul_(-(2.0**-32)).log1p_().neg_()
