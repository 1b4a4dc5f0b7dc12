"""The paged KV cache: one tensor a layer in FlashInfer's NHD layout, and the page table by slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sonar_engine.config import EngineConfig
from sonar_engine.errors import ConfigError
from sonar_engine.models.model_config import ModelConfig

_GIB = 2**30
_ALIGNMENT = 64  # bytes, a cache line


@dataclass(frozen=True)
class KvCachePlan:
    """Sizes, decided before anything is allocated. Lengths in tokens.

    `reserved_len` is what one sequence may hold at most: `max_model_len` and, with drafts, k + 2 positions more.
    """

    num_pages: int
    page_size: int
    max_pages_per_seq: int
    reserved_len: int
    bytes_per_token: int  # keys and values of all layers, those of the drafter included
    has_spare_page: bool = False  # page `num_pages`, which no request holds; in no count

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_size * self.bytes_per_token

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size


@dataclass(frozen=True)
class KvCache:
    """`layers[i]` is [num_pages, 2, page_size, Hkv, D] (index 0 keys, 1 values), in the model's dtype.

    `page_table` is int32 [max_num_seqs, max_pages_per_seq], by slot; a row is valid up to its sequence's length.
    With a spare page layers have one page more, and `padded_table` is the page table with a last row, whose pages are
    all the spare one.
    """

    plan: KvCachePlan
    layers: list[torch.Tensor]
    page_table: torch.Tensor
    padded_table: torch.Tensor | None = None  # int32 [max_num_seqs + 1, max_pages_per_seq]


def bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token's keys and values take over all layers."""
    return model.num_layers * 2 * model.num_kv_heads * model.head_dim * dtype.itemsize


def plan_kv_cache(
    engine: EngineConfig, model: ModelConfig, max_model_len: int, dtype: torch.dtype, drafter_bytes_per_token: int = 0
) -> KvCachePlan:
    """`kv_cache_tokens` pages when given, else as many as `max_num_seqs` full sequences need within `kv_cache_gib`.

    Every page has a place in the drafter's layers too. Raises ConfigError when the pages cannot hold one sequence of
    `max_model_len`.
    """
    page_size = engine.page_size
    per_token = bytes_per_token(model, dtype) + drafter_bytes_per_token
    drafting = engine.speculative.method != "none"
    reserved_len = max_model_len + (engine.speculative.num_speculative_tokens + 2 if drafting else 0)
    pages_per_seq = -(-reserved_len // page_size)
    if engine.kv_cache_tokens is not None:
        num_pages = engine.kv_cache_tokens // page_size
        have = f"kv_cache_tokens={engine.kv_cache_tokens} is {num_pages} pages of {page_size} tokens"
        remedy = f"raise kv_cache_tokens to {pages_per_seq * page_size}"
    else:
        within_memory = int(engine.kv_cache_gib * _GIB) // (per_token * page_size)
        num_pages = min(engine.max_num_seqs * pages_per_seq, within_memory)
        have = (
            f"kv_cache_gib={engine.kv_cache_gib:g} is {num_pages} pages of {page_size} tokens "
            f"at {per_token:,} bytes a token"
        )
        remedy = f"raise kv_cache_gib to {pages_per_seq * page_size * per_token / _GIB:.3g}"
    if num_pages < pages_per_seq:
        raise ConfigError(
            f"the KV cache cannot hold one sequence of max_model_len={max_model_len}: that needs {pages_per_seq} "
            f"pages, and {have}; {remedy}, or lower max_model_len"
        )
    return KvCachePlan(num_pages, page_size, pages_per_seq, reserved_len, per_token)


def allocate_kv_cache(
    plan: KvCachePlan, model: ModelConfig, max_num_seqs: int, dtype: torch.dtype, device: torch.device
) -> KvCache:
    """The layers of one model, and an empty page table."""
    layers = allocate_layers(plan, model, dtype, device)
    if not plan.has_spare_page:
        page_table = torch.zeros((max_num_seqs, plan.max_pages_per_seq), dtype=torch.int32, device=device)
        return KvCache(plan, layers, page_table)
    padded_table = torch.zeros((max_num_seqs + 1, plan.max_pages_per_seq), dtype=torch.int32, device=device)
    padded_table[max_num_seqs] = plan.num_pages
    return KvCache(plan, layers, padded_table[:max_num_seqs], padded_table)


def allocate_layers(
    plan: KvCachePlan, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Zeroed tensors. On a CPU memory becomes resident as it is written, a huge page at a time where there are any."""
    shape = (plan.num_pages + plan.has_spare_page, 2, plan.page_size, model.num_kv_heads, model.head_dim)
    try:
        return [_zeros(shape, dtype, device) for _ in range(model.num_layers)]
    except (torch.OutOfMemoryError, MemoryError):
        raise ConfigError(
            f"no memory for a KV cache of {plan.num_bytes / _GIB:.2f} GiB on {device}; lower kv_cache_gib, "
            "kv_cache_tokens, max_num_seqs or max_model_len"
        ) from None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)  # calloc: untouched memory is not resident
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)
