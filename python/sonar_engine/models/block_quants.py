"""The common block formats of GGUF, dequantised over whole arrays: several times faster than the `gguf` package.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A block is 32 values; fp16 scale `d`,
for Q4_1 fp16 minimum `m`, then the integers; in 4-bit blocks the low nibbles are values 0..15, the high ones 16..31.
Every function takes uint8 [rows, row bytes] and returns fp32 [rows, values], bit for bit what `gguf` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from gguf.constants import GGMLQuantizationType

_BLOCK = 32


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The fp16 at byte `at` of every block, as fp32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[blocks, 16] bytes -> fp32 [blocks, 32] of 0..15."""
    values = np.empty((packed.shape[0], _BLOCK), dtype=np.float32)
    values[:, :16] = packed & 0x0F
    values[:, 16:] = packed >> 4
    return values


def q4_0(raw: np.ndarray) -> np.ndarray:
    """d (q - 8)"""
    blocks = raw.reshape(-1, 18)
    values = _nibbles(blocks[:, 2:])
    values -= 8
    values *= _half(blocks, 0)
    return values.reshape(raw.shape[0], -1)


def q4_1(raw: np.ndarray) -> np.ndarray:
    """d q + m"""
    blocks = raw.reshape(-1, 20)
    values = _nibbles(blocks[:, 4:])
    values *= _half(blocks, 0)
    values += _half(blocks, 2)
    return values.reshape(raw.shape[0], -1)


def q8_0(raw: np.ndarray) -> np.ndarray:
    """d q, q a signed byte"""
    blocks = raw.reshape(-1, 34)
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _half(blocks, 0)
    return values.reshape(raw.shape[0], -1)


QUICK: Mapping[GGMLQuantizationType, Callable[[np.ndarray], np.ndarray]] = {
    GGMLQuantizationType.Q4_0: q4_0,
    GGMLQuantizationType.Q4_1: q4_1,
    GGMLQuantizationType.Q8_0: q8_0,
}
