"""Picks the attention backend from the configuration, and layers with different windows into one `Attention`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Literal

import torch

from sonar_engine.attention.base import Attention
from sonar_engine.config import EngineConfig
from sonar_engine.errors import ConfigError
from sonar_engine.kv_cache import KvCache
from sonar_engine.layers.base import Ops
from sonar_engine.layers.select import cpu_kernels, native_extension_error, num_threads
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.step_buffers import BatchMetadata

AttentionBackend = Literal["torch", "native", "flashinfer"]

_NATIVE_MAX_HEAD_DIM = 256
_FLASHINFER_HEAD_DIMS = (64, 128, 256)


class MixedWindowAttention:
    """Layers of one model that see windows of different lengths: one backend a window, each over all the caches."""

    def __init__(self, by_window: dict[int | None, Attention], layer_windows: tuple[int | None, ...]) -> None:
        self._backends = list(by_window.values())
        self._by_layer = [by_window[window] for window in layer_windows]

    def begin(self, batch: BatchMetadata) -> None:
        for backend in self._backends:
            backend.begin(batch)

    def can_capture(self, num_rows: int, q_len: int) -> bool:
        return all(backend.can_capture(num_rows, q_len) for backend in self._backends)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._by_layer[layer].forward(layer, q, k, v)


def select_attention(
    engine: EngineConfig, model: ModelConfig, cache: KvCache, ops: Ops
) -> tuple[AttentionBackend, Attention]:
    """The backend's name and the backend; ConfigError when the one asked for cannot run here.

    `ops` are the model's: the native backend runs on the thread team of native ones.
    """
    backend = choose_backend(engine, model, cache.page_table.device, cache.layers[0].dtype)
    build = _builder(backend, engine, model, cache, ops)
    windows = dict.fromkeys(model.layer_windows)
    if len(windows) == 1:
        return backend, build(next(iter(windows)))
    return backend, MixedWindowAttention({window: build(window) for window in windows}, model.layer_windows)


def choose_backend(
    engine: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """`auto`: the Rust kernels on a CPU, FlashInfer on CUDA, torch where those cannot run."""
    asked = engine.attention_backend
    obstacles: dict[str, Callable[[], str | None]] = {
        "native": lambda: _native_obstacle(model, device),
        "flashinfer": lambda: _flashinfer_obstacle(engine, model, device, dtype),
        "torch": lambda: None,
    }
    if asked == "auto":
        preferred: AttentionBackend = "flashinfer" if device.type == "cuda" else "native"
        return preferred if obstacles[preferred]() is None else "torch"
    obstacle = obstacles[asked]()
    if obstacle is not None:
        raise ConfigError(f"attention_backend={asked} cannot be used: {obstacle}; use auto or torch")
    return asked


def _native_obstacle(model: ModelConfig, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"it runs on a CPU, and the device is {device.type}"
    if model.head_dim % 8 or model.head_dim > _NATIVE_MAX_HEAD_DIM:
        return f"head_dim must be a multiple of 8 up to {_NATIVE_MAX_HEAD_DIM}, and the model's is {model.head_dim}"
    return native_extension_error()


def _flashinfer_obstacle(
    engine: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> str | None:
    if device.type != "cuda":
        return f"it runs on CUDA, and the device is {device.type}"
    if engine.batch_invariant:
        return "its tiles follow the batch's shape, so batch_invariant cannot be kept"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 or bfloat16, and the dtype is {str(dtype).removeprefix('torch.')}"
    if model.head_dim not in _FLASHINFER_HEAD_DIMS:
        return f"head_dim must be one of {_FLASHINFER_HEAD_DIMS}, and the model's is {model.head_dim}"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package is not installed (pip install 'sonar-engine[cuda]')"
    return None


def _builder(
    backend: AttentionBackend, engine: EngineConfig, model: ModelConfig, cache: KvCache, ops: Ops
) -> Callable[[int | None], Attention]:
    scale = model.head_dim**-0.5
    if backend == "native":
        from sonar_engine.attention.native_attention import NativeAttention

        kernels = cpu_kernels(ops)
        return lambda window: NativeAttention(cache.layers, scale, window, num_threads(engine), kernels=kernels)
    if backend == "flashinfer":
        from sonar_engine.attention.flashinfer_attention import FlashInferAttention

        return lambda window: FlashInferAttention(cache.layers, model.num_heads, scale, window)
    from sonar_engine.attention.torch_attention import TorchAttention

    return lambda window: TorchAttention(cache.layers, scale, window, batch_invariant=engine.batch_invariant)
