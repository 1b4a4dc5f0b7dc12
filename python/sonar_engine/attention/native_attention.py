"""Paged attention on the Rust CPU kernels (crate `sonar-cpu`): decode, verification and prefill in one call.

The cache is read in place. A token's result does not depend, bit for bit, on the rest of the batch, on how its
sequence was split into steps, or on the number of threads.
"""

from __future__ import annotations

import torch

from sonar_engine._scheduler import CpuAttention, CpuKernels
from sonar_engine.errors import ConfigError
from sonar_engine.layers.native import dtype_code
from sonar_engine.step_buffers import BatchMetadata


class NativeAttention:
    """Implements `attention.base.Attention` over caches [num_pages, 2, page_size, Hkv, D], one a layer.

    `scale` multiplies the products of queries and keys; `window` is the number of keys a token sees, itself
    included (None: all). `kernels` shares the thread team of a `NativeOps`.
    """

    def __init__(
        self,
        kv_caches: list[torch.Tensor],
        scale: float,
        window: int | None = None,
        num_threads: int | None = None,
        *,
        kernels: CpuKernels | None = None,
    ) -> None:
        _check_caches(kv_caches)
        _, _, page_size, num_kv_heads, head_dim = kv_caches[0].shape
        self._kv_caches = kv_caches  # the kernels hold addresses: the tensors must stay alive
        self._dtype = kv_caches[0].dtype
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim
        self._batch: BatchMetadata | None = None
        self._attention = CpuAttention(
            kernels or CpuKernels(num_threads or torch.get_num_threads()),
            [cache.data_ptr() for cache in kv_caches],
            dtype_code(self._dtype),
            num_kv_heads,
            head_dim,
            page_size,
            window or 0,
            scale,
        )

    def begin(self, batch: BatchMetadata) -> None:
        """Takes the step's arrays; they are read until the last layer's `forward`."""
        self._batch = batch
        self._attention.begin(
            batch.num_reqs,
            batch.num_tokens,
            batch.qo_indptr.data_ptr(),
            batch.slots.data_ptr(),
            batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(),
            batch.page_table.data_ptr(),
            batch.page_table.stride(0),
        )

    def can_capture(self, num_rows: int, q_len: int) -> bool:
        return False  # it runs on a CPU

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes k, v [T, Hkv, D] into the cache, attends with q [T, Hq, D]: [T, Hq * D] in the cache's dtype."""
        num_tokens, num_q_heads, head_dim = q.shape
        if self._batch is None or num_tokens != self._batch.num_tokens:
            raise ConfigError(f"begin() was not called for this batch of {num_tokens} tokens")
        if head_dim != self._head_dim or q.dtype != self._dtype or k.dtype != self._dtype or v.dtype != self._dtype:
            raise ConfigError(f"queries, keys and values must be {self._dtype} with heads of {self._head_dim}")
        q, k, v = _heads_adjacent(q), _heads_adjacent(k), _heads_adjacent(v)
        out = torch.empty((num_tokens, num_q_heads * head_dim), dtype=self._dtype)
        self._attention.forward(
            layer,
            num_q_heads,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            out.data_ptr(),
        )
        return out


def _check_caches(kv_caches: list[torch.Tensor]) -> None:
    if not kv_caches:
        raise ConfigError("attention needs the KV cache of at least one layer")
    first = kv_caches[0]
    for cache in kv_caches:
        if cache.dim() != 5 or cache.shape[1] != 2 or not cache.is_contiguous() or cache.device.type != "cpu":
            raise ConfigError("a KV cache must be a contiguous CPU tensor [pages, 2, page_size, heads, head_dim]")
        if cache.shape != first.shape or cache.dtype != first.dtype:
            raise ConfigError("the KV caches of all layers must have one shape and dtype")
    if first.shape[4] % 8 != 0:
        raise ConfigError(f"head_dim {first.shape[4]} must be a multiple of 8 for the native attention; use torch's")


def _heads_adjacent(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] with the heads of a token side by side, copied only when they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
