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
    """`buffer_names` are the constructor's names of the arrays that `plan` takes first, `choice` that of its further
    argument. Only where the queries of a row may be several is `plan` told that the attention is causal."""

    buffer_names: tuple[str, ...]
    choice: str
    causal: bool

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        **arguments: Any,
    ) -> None:
        assert arguments.keys() <= {*self.buffer_names, self.choice}
        self._use_cuda_graph = use_cuda_graph
        self._arrays = [arguments.get(name) for name in self.buffer_names]
        self._int_workspace = torch.zeros(8 * 2**20, dtype=torch.uint8)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        self._int_workspace = int_workspace_buffer

    def plan(self, *arguments: Any, causal: bool = False, **options: Any) -> None:
        *arrays, _num_qo_heads, _num_kv_heads, _head_dim, page_size = arguments
        assert causal == self.causal
        assert len(arrays) == len(self.buffer_names)
        if self._use_cuda_graph:
            assert len(arrays[0]) == len(self._arrays[0])  # the batch size is fixed
            for buffer, array in zip(self._arrays, arrays, strict=True):
                buffer[: len(array)].copy_(array)
        else:
            self._arrays = arrays
        self._int_workspace[:4].view(torch.int32)[0] = len(arrays[-2])  # pages of the last plan
        self._page_size, self._scale, self._window = page_size, options["sm_scale"], options["window_left"]

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        *qo_indptr, indptr, indices, last_page_len = (array.tolist() for array in self._arrays)
        starts = qo_indptr[0] if qo_indptr else range(len(indptr))  # one query token a row when decoding
        assert int(self._int_workspace[:4].view(torch.int32)[0]) == indptr[-1]
        outputs = []
        for row, last in enumerate(last_page_len):
            pages = paged_kv_cache[indices[indptr[row] : indptr[row + 1]]]  # [P, 2, page_size, Hkv, D]
            kv_len = (len(pages) - 1) * self._page_size + last
            keys, values = pages.transpose(0, 1).flatten(1, 2)[:, :kv_len].transpose(1, 2)  # [Hkv, L, D]
            queries = q[starts[row] : starts[row + 1]].transpose(0, 1)
            at = torch.arange(kv_len - queries.shape[1], kv_len)[:, None]
            mask = torch.arange(kv_len) <= at
            if self._window >= 0:
                mask &= torch.arange(kv_len) >= at - self._window
            out = F.scaled_dot_product_attention(queries, keys, values, mask, scale=self._scale, enable_gqa=True)
            outputs.append(out.transpose(0, 1))
        return torch.cat(outputs)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    buffer_names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    choice = "backend"
    causal = True


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    buffer_names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    choice = "use_tensor_cores"
    causal = False


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
