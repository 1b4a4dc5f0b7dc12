"""Forward passes captured once as CUDA graphs and replayed for every batch of their shape.

A shape is a number of rows with the same number of query tokens each: 1 for plain decoding and for a drafter's own
passes, 1 + k for verification. A batch is padded to the next number of rows that was captured; padding rows have a slot
behind the others, whose pages are all the spare one that no request holds. Other batches run eagerly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sonar_engine.attention.base import Attention
from sonar_engine.config import EngineConfig
from sonar_engine.errors import ConfigError
from sonar_engine.fixed_batch import FixedBatch
from sonar_engine.kv_cache import KvCache
from sonar_engine.step_buffers import BatchMetadata

_MOST_TOKENS = 512  # of one graph; larger passes keep the device busy without one

Tensors = tuple[torch.Tensor, ...]
Pass = Callable[..., Tensors]
"""(positions int32 [T], inputs [T, ...]) -> outputs [T, ...], behind `Attention.begin`; always the same kernels."""
Capture = Callable[[Callable[[], Tensors]], Callable[[], Tensors]]
"""What it returns does the work of the function again, over the same memory, and gives the same tensors every time."""


class Shape(NamedTuple):
    """R rows of Q tokens."""

    num_rows: int
    q_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.q_len


class Input(NamedTuple):
    """What a pass reads for every token."""

    shape: tuple[int, ...]  # of one token
    dtype: torch.dtype


@dataclass(frozen=True)
class _Captured:
    batch: FixedBatch
    replay: Callable[[], Tensors]


class CudaGraphs:
    """The graphs of one pass over one KV cache. Nothing is captured before `capture_all`."""

    def __init__(
        self,
        run: Pass,
        inputs: Sequence[Input],
        attention: Attention,
        kv_cache: KvCache,
        *,
        shapes: Sequence[Shape],
        capture: Capture | None = None,
    ) -> None:
        """`kv_cache` has a spare page, `attention` attends over it and can be captured for all of `shapes`."""
        self._run = run
        self._attention = attention
        self._kv_cache = kv_cache
        self._shapes = sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)
        self._capture = CudaCapture() if capture is None else capture
        most, device = max((shape.num_tokens for shape in shapes), default=0), kv_cache.page_table.device
        # Of all shapes: a pass has read them before the next one's are written.
        self._inputs = [torch.zeros((most, *each.shape), dtype=each.dtype, device=device) for each in inputs]
        self._captured: dict[Shape, _Captured] = {}
        self._rows: dict[int, list[int]] = {}  # captured numbers of rows in order, by query tokens

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Captures every shape, the largest first, so that the others fit into the memory it took.

        Runs over the spare page alone. Raises ConfigError when there is no memory for it.
        """
        try:
            for shape in self._shapes:
                self._captured[shape] = self._capture_one(shape)
        except torch.OutOfMemoryError:
            raise ConfigError(
                "no memory for CUDA graphs; set cuda_graphs to false, or lower kv_cache_gib or max_num_seqs"
            ) from None
        for shape in reversed(self._shapes):
            self._rows.setdefault(shape.q_len, []).append(shape.num_rows)

    def replay(self, batch: BatchMetadata, *inputs: torch.Tensor) -> Tensors | None:
        """The outputs [T, ...] of a pass over `batch`, the caller's own; None: its shape was not captured."""
        shape = self._shape_of(batch)
        return None if shape is None else self._replay(self._captured[shape], batch, inputs)

    def _shape_of(self, batch: BatchMetadata) -> Shape | None:
        """The smallest captured shape that holds the batch."""
        rows = self._rows.get(batch.max_q_len, [])
        at = bisect_left(rows, batch.num_reqs)
        if at == len(rows) or batch.num_tokens != batch.num_reqs * batch.max_q_len:
            return None
        return Shape(rows[at], batch.max_q_len)

    @torch.inference_mode()
    def _replay(self, captured: _Captured, batch: BatchMetadata, inputs: Tensors) -> Tensors:
        self._attention.begin(captured.batch.fill(batch))
        for static, value in zip(self._inputs, inputs, strict=True):
            static[: batch.num_tokens].copy_(value)
        # A copy: the next replay of any graph of the pool may write over the outputs.
        return tuple(output[: batch.num_tokens].clone() for output in captured.replay())

    def _capture_one(self, shape: Shape) -> _Captured:
        batch = FixedBatch(*shape, self._kv_cache)
        padding = batch.fill(None)
        self._attention.begin(padding)
        inputs = [static[: shape.num_tokens] for static in self._inputs]
        return _Captured(batch, self._capture(lambda: self._run(padding.positions, *inputs)))


class CudaCapture:
    """A `Capture` into CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        function()  # what kernels set up in their first call cannot be captured
        graph = torch.cuda.CUDAGraph()
        # Thread-local: what other threads ask of CUDA meanwhile does not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = function()

        def replay() -> Tensors:
            graph.replay()
            return outputs

        return replay


def wants_graphs(engine_config: EngineConfig, device: torch.device) -> bool:
    """Whether passes on `device` are to be captured, where the attention backend allows it."""
    return engine_config.cuda_graphs and device.type == "cuda"


def open_graphs(
    engine_config: EngineConfig, kv_cache: KvCache, attention: Attention, run: Pass, inputs: Sequence[Input]
) -> CudaGraphs | None:
    """The graphs of a pass with all shapes captured; None where there are to be none."""
    if not wants_graphs(engine_config, kv_cache.page_table.device):
        return None
    shapes = [shape for shape in graph_shapes(engine_config) if attention.can_capture(*shape)]
    if not shapes:
        return None
    graphs = CudaGraphs(run, inputs, attention, kv_cache, shapes=shapes)
    graphs.capture_all()
    return graphs


def graph_shapes(engine_config: EngineConfig) -> list[Shape]:
    """What steps of decoding mostly look like: every row with one token, or with all drafts that it may have."""
    speculative = engine_config.speculative
    most = 1 if speculative.method == "none" else 1 + speculative.num_speculative_tokens
    q_lens = range(1, most + 1) if speculative.draft_length == "adaptive" else sorted({1, most})
    most_rows = engine_config.max_num_seqs
    return [Shape(rows, q_len) for q_len in q_lens for rows in row_buckets(min(most_rows, _MOST_TOKENS // q_len))]


def row_buckets(most: int) -> list[int]:
    """1, 2, 4, 8, then powers of two and the halves between them, and `most` itself as the last."""
    buckets, size = [1, 2, 4], 8
    while size < most:
        buckets += [size, size + size // 2]
        size *= 2
    return [*(bucket for bucket in buckets if bucket < most), most]
