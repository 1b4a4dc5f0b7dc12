"""FlashInfer's paged wrappers in torch on a CPU, as far as they are used: the same arguments, buffers and checks.

In graph mode `plan` writes to the given buffers and to the plan workspace, and `run` reads nothing else, so that any
wrapper over the same buffers runs by the last plan, as a captured kernel does.
"""

# ruff: noqa: PLR0917 (the arguments are FlashInfer's)

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F


class _Wrapper:
    def __init__(self, buffers: list[torch.Tensor | None], use_cuda_graph: bool) -> None:
        self._qo_indptr, self._indptr, self._indices, self._last_page_len = buffers
        self._use_cuda_graph = use_cuda_graph
        self._int_workspace = torch.zeros(8 * 2**20, dtype=torch.uint8)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        self._int_workspace = int_workspace_buffer

    def _plan(self, arrays: list[torch.Tensor], page_size: int, options: dict[str, Any]) -> None:
        assert not self._use_cuda_graph or len(arrays[0]) == len(self._qo_indptr)  # the batch size is fixed
        if self._use_cuda_graph:
            for buffer, array in zip(self._buffers(), arrays, strict=True):
                buffer[: len(array)].copy_(array)
        else:
            self._qo_indptr, self._indptr, self._indices, self._last_page_len = arrays
        self._int_workspace[:4].view(torch.int32)[0] = len(arrays[2])  # pages of the last plan
        self._page_size, self._scale, self._window = page_size, options["sm_scale"], options["window_left"]

    def _buffers(self) -> tuple[Any, ...]:
        return self._qo_indptr, self._indptr, self._indices, self._last_page_len

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        qo_indptr, indptr, indices, last_page_len = (buffer.tolist() for buffer in self._buffers())
        assert int(self._int_workspace[:4].view(torch.int32)[0]) == indptr[-1]
        outputs = []
        for row, last in enumerate(last_page_len):
            pages = paged_kv_cache[indices[indptr[row] : indptr[row + 1]]]  # [P, 2, page_size, Hkv, D]
            kv_len = (len(pages) - 1) * self._page_size + last
            keys, values = pages.transpose(0, 1).flatten(1, 2)[:, :kv_len].transpose(1, 2)  # [Hkv, L, D]
            queries = q[qo_indptr[row] : qo_indptr[row + 1]].transpose(0, 1)
            at = torch.arange(kv_len - queries.shape[1], kv_len)[:, None]
            mask = torch.arange(kv_len) <= at
            if self._window >= 0:
                mask &= torch.arange(kv_len) >= at - self._window
            out = F.scaled_dot_product_attention(queries, keys, values, mask, scale=self._scale, enable_gqa=True)
            outputs.append(out.transpose(0, 1))
        return torch.cat(outputs)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = [qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf]
        super().__init__(buffers, use_cuda_graph)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        **options: Any,
    ) -> None:
        assert causal
        self._plan([qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len], page_size, options)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        qo_indptr = None if paged_kv_indptr_buffer is None else torch.arange(len(paged_kv_indptr_buffer))
        buffers = [qo_indptr, paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer]
        super().__init__(buffers, use_cuda_graph)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        self._plan([torch.arange(len(indptr)), indptr, indices, last_page_len], page_size, options)


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    page_size = paged_kv_cache.shape[2]
    pages = kv_indices[kv_indptr[batch_indices] + positions // page_size]
    paged_kv_cache[pages, 0, positions % page_size] = append_key
    paged_kv_cache[pages, 1, positions % page_size] = append_value


def module() -> ModuleType:
    """To stand in `sys.modules` under the name `flashinfer`."""
    fake = ModuleType("flashinfer")
    for item in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper, append_paged_kv_cache):
        setattr(fake, item.__name__, item)
    return fake
