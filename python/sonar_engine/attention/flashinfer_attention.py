"""Paged attention on CUDA through FlashInfer's batch wrappers, planned once a step.

The plan reads lengths from the host's copy of the packed batch; page indices are built from the page table on the
device, so nothing waits for the device. Source: https://docs.flashinfer.ai/api/attention.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sonar_kernels import build_page_indices

from sonar_engine.step_buffers import BatchMetadata

_WORKSPACE_BYTES = 128 * 2**20  # split-kv partial results, as FlashInfer's documentation advises
_LAYOUT = "NHD"


@dataclass(frozen=True)
class _Step:
    """What all layers of a step share: the planned wrapper and where its keys go."""

    wrapper: Any
    batch: BatchMetadata
    page_indices: torch.Tensor  # int32 [paged_kv_indptr[-1]]


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
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=kv_caches[0].device)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT)
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, _LAYOUT, use_tensor_cores=True)
        self._step: _Step | None = None

    def begin(self, batch: BatchMetadata) -> None:
        indptr = _host_tensor(batch, "paged_kv_indptr")
        indices = build_page_indices(batch.page_table, batch.slots, batch.paged_kv_indptr, int(indptr[-1]))
        last_page_len = _host_tensor(batch, "paged_kv_last_page_len")
        sizes = (self._num_heads, self._num_kv_heads, self._head_dim, self._page_size)
        if batch.max_q_len == 1:
            self._decode.plan(indptr, indices, last_page_len, *sizes, **self._options)
            wrapper = self._decode
        else:
            qo_indptr = _host_tensor(batch, "qo_indptr")
            self._prefill.plan(qo_indptr, indptr, indices, last_page_len, *sizes, causal=True, **self._options)
            wrapper = self._prefill
        self._step = _Step(wrapper, batch, indices)

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


def _host_tensor(batch: BatchMetadata, section: str) -> torch.Tensor:
    """A copy: the planner may overwrite its slot while the wrapper still holds the plan."""
    return torch.from_numpy(np.array(batch.host[section], dtype=np.int32))
