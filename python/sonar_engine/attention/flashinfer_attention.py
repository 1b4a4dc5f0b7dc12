"""Paged attention on CUDA through FlashInfer's batch wrappers, planned once a step.

The plan reads lengths from the host's copy of the packed batch; page indices are built from the page table on the
device, so nothing waits for the device. Source: https://docs.flashinfer.ai/api/attention.html

Batches that are fixed have wrappers of their own for each shape, whose buffers stay, so that what `forward` queues can
be replayed as a CUDA graph; the plan is made outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sonar_kernels import build_page_indices

from sonar_engine.step_buffers import BatchMetadata

_WORKSPACE_BYTES = 256 * 2**20  # split-kv partial results
_PLAN_BYTES = 2**18  # of one plan of a fixed shape: some words a tile, and a graph has few tiles
_PLANS_AHEAD = 3  # plans that the host may make before the device has taken the first of them
_LAYOUT = "NHD"


class _Turns:
    """Wrappers that take turns. A plan lies in its wrapper's pinned memory until the device has copied it, which
    FlashInfer does not guard: the host would write over it when it plans the next pass while the device is behind."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._wrappers = [(build(), torch.cuda.Event()) for _ in range(_PLANS_AHEAD)]
        self._next = 0

    def plan(self, *args: Any, **options: Any) -> Any:
        """The planned wrapper. Waits for the device when that is `_PLANS_AHEAD` plans behind."""
        wrapper, copied = self._wrappers[self._next]
        self._next = (self._next + 1) % len(self._wrappers)
        copied.synchronize()  # returns at once before the first plan
        wrapper.plan(*args, **options)
        copied.record()
        return wrapper


@dataclass(frozen=True)
class _Fixed:
    """What one shape's wrappers share."""

    turns: _Turns
    page_indices: torch.Tensor  # int32 [R * max_pages]


@dataclass(frozen=True)
class _Step:
    """What all layers of a step share: the planned wrapper and where its keys go."""

    wrapper: Any
    batch: BatchMetadata
    page_indices: torch.Tensor  # int32 [paged_kv_indptr[-1]], or longer


class FlashInferAttention:
    """`attention.base.Attention` over `kv_caches` [num_pages, 2, page_size, Hkv, D], one a layer, fp16 or bf16.

    One query token in every row plans the decode wrapper, anything else the prefill wrapper, which also serves
    verification and mixed batches. `window` counts the token itself.
    """

    def __init__(self, kv_caches: list[torch.Tensor], num_heads: int, scale: float, window: int | None = None) -> None:
        import flashinfer

        self._append = flashinfer.append_paged_kv_cache
        self._caches = kv_caches
        _, _, self._page_size, self._num_kv_heads, self._head_dim = kv_caches[0].shape
        self._num_heads = num_heads
        self._options = {
            "sm_scale": scale,
            "window_left": -1 if window is None else window - 1,
            "q_data_type": kv_caches[0].dtype,
            "kv_data_type": kv_caches[0].dtype,
        }
        device = kv_caches[0].device
        self._build_prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._build_decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        # One after the other on one stream, all wrappers may write to the same workspaces.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plan_workspace = torch.zeros(_PLAN_BYTES, dtype=torch.uint8, device=device)
        self._prefill = _Turns(lambda: self._build_prefill(self._workspace, _LAYOUT))
        self._decode = _Turns(lambda: self._build_decode(self._workspace, _LAYOUT, use_tensor_cores=True))
        self._fixed: dict[tuple[int, int], _Fixed] = {}  # by rows and query tokens
        self._step: _Step | None = None

    def begin(self, batch: BatchMetadata) -> None:
        indptr = _host_tensor(batch, "paged_kv_indptr")
        indices = build_page_indices(batch.page_table, batch.slots, batch.paged_kv_indptr, int(indptr[-1]))
        last_page_len = _host_tensor(batch, "paged_kv_last_page_len")
        sizes = (self._num_heads, self._num_kv_heads, self._head_dim, self._page_size)
        fixed = self._fixed_of(batch) if batch.is_fixed else None
        if batch.max_q_len == 1:
            turns = self._decode if fixed is None else fixed.turns
            wrapper = turns.plan(indptr, indices, last_page_len, *sizes, **self._options)
        else:
            qo_indptr = _host_tensor(batch, "qo_indptr")
            turns = self._prefill if fixed is None else fixed.turns
            wrapper = turns.plan(qo_indptr, indptr, indices, last_page_len, *sizes, causal=True, **self._options)
        self._step = _Step(wrapper, batch, indices if fixed is None else fixed.page_indices)

    def can_capture(self, num_rows: int, q_len: int) -> bool:
        """Where the partial results fit into the workspace."""
        num_bytes = split_kv_bytes(
            num_rows,
            q_len,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim,
            num_sms=torch.cuda.get_device_properties(self._workspace.device).multi_processor_count,
        )
        return num_bytes <= _WORKSPACE_BYTES

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        step = self._step
        if step is None:
            raise RuntimeError("begin(batch) must come before forward")
        batch, cache = step.batch, self._caches[layer]
        self._append(
            k,
            v,
            batch.token_reqs,
            batch.positions,
            cache,
            step.page_indices,
            batch.paged_kv_indptr,
            batch.paged_kv_last_page_len,
            kv_layout=_LAYOUT,
        )
        return step.wrapper.run(q.contiguous(), cache).flatten(1)

    def _fixed_of(self, batch: BatchMetadata) -> _Fixed:
        """The shape's wrappers, built for its first batch. They differ in their pinned memory alone, so that a graph
        captured with one of them runs by the plan of whichever was planned last."""
        shape = (batch.num_reqs, batch.max_q_len)
        if shape not in self._fixed:
            size = batch.num_reqs * batch.page_table.shape[1]
            page_indices = torch.zeros(size, dtype=torch.int32, device=batch.page_table.device)
            self._fixed[shape] = _Fixed(_Turns(lambda: self._build_fixed(batch, page_indices)), page_indices)
        return self._fixed[shape]

    def _build_fixed(self, batch: BatchMetadata, page_indices: torch.Tensor) -> Any:
        if batch.max_q_len == 1:
            wrapper = self._build_decode(
                self._workspace,
                _LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=batch.paged_kv_indptr,
                paged_kv_indices_buffer=page_indices,
                paged_kv_last_page_len_buffer=batch.paged_kv_last_page_len,
            )
        else:
            wrapper = self._build_prefill(
                self._workspace,
                _LAYOUT,
                use_cuda_graph=True,
                qo_indptr_buf=batch.qo_indptr,
                paged_kv_indptr_buf=batch.paged_kv_indptr,
                paged_kv_indices_buf=page_indices,
                paged_kv_last_page_len_buf=batch.paged_kv_last_page_len,
                backend="fa2",  # the one that splits the keys of few queries; its plan has one size a shape
            )
        wrapper.reset_workspace_buffer(self._workspace, self._plan_workspace)
        return wrapper


def split_kv_bytes(num_rows: int, q_len: int, *, num_heads: int, num_kv_heads: int, head_dim: int, num_sms: int) -> int:
    """Of the partial results that a wrapper in graph mode makes room for, whatever the lengths.

    Source: `PrefillPlan` in FlashInfer's include/flashinfer/attention/scheduler.cuh, backend fa2.
    """
    group, num_tokens = num_heads // num_kv_heads, num_rows * q_len
    longest = (num_tokens - num_rows + 1) * group  # the plan allows for any division of the tokens among the rows
    tile = 128 if longest > 64 and head_dim < 256 else 64 if longest > 16 else 16
    num_tiles = -(-num_tokens * group // tile) + num_rows - 1
    num_blocks = max(2 * num_sms // num_kv_heads, num_tiles)
    return num_heads * num_blocks * tile * (head_dim + 1) * 4  # fp32 outputs and their scales


def _host_tensor(batch: BatchMetadata, section: str) -> torch.Tensor:
    """A copy, since the planner may overwrite its slot while the wrapper still holds the plan; pinned, so that its way
    to the device is not waited for."""
    tensor = torch.from_numpy(np.array(batch.host[section], dtype=np.int32))
    return tensor.pin_memory() if batch.page_table.is_cuda else tensor
