"""The coins of `sonar_kernels.coins` as Triton functions."""

# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def exponential(ids, seed_lo, seed_hi, position):
    """ids int32 [N], the rest int32 scalars -> fp32 [N] in (0, inf], as `coins.exponential` within 5e-6, relative."""
    words = mix(ids.to(tl.uint32, bitcast=True) * 0x9E3779B9 + seed_lo.to(tl.uint32, bitcast=True))
    words = mix(words ^ seed_hi.to(tl.uint32, bitcast=True))
    words = mix(words + position.to(tl.uint32, bitcast=True) * 0x85EBCA6B)
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # A GPU's fast logarithm is good to 2**-22 absolute, too little for small u: there a series, below 2**-40 relative.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7 + u / 8)))))))
    return tl.where(u < 0.0625, series, -tl.log(1 - u))
