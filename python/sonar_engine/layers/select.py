"""Picks the implementation of `Ops` from the configuration."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import torch

from sonar_engine.config import EngineConfig
from sonar_engine.errors import ConfigError
from sonar_engine.layers.base import Ops
from sonar_engine.layers.torch_ops import TorchOps

if TYPE_CHECKING:
    from sonar_engine._scheduler import CpuKernels

LinearBackend = Literal["torch", "native"]


def native_extension_error() -> str | None:
    """Why the Rust CPU kernels cannot be used, or None."""
    try:
        import sonar_engine.attention.native_attention
        import sonar_engine.layers.native  # noqa: F401
    except ImportError as error:
        return f"the extension with the CPU kernels cannot be imported ({error})"
    return None


def num_threads(engine: EngineConfig) -> int:
    """CPU threads for the kernels: what was asked for, else one a core that this process may run on."""
    return engine.num_threads or len(os.sched_getaffinity(0))


def cpu_kernels(ops: Ops) -> CpuKernels | None:
    """The Rust kernels under `ops`, if it runs on them."""
    if native_extension_error() is not None:
        return None
    from sonar_engine.layers.native import NativeOps

    return ops.kernels if isinstance(ops, NativeOps) else None


def select_ops(engine: EngineConfig, device: torch.device) -> tuple[LinearBackend, Ops]:
    """`auto`: the Rust kernels on a CPU, torch elsewhere; ConfigError when the one asked for cannot run here.

    Beside the Rust kernels torch itself keeps to one thread, in this whole process.
    """
    obstacle = native_extension_error() if device.type == "cpu" else f"it runs on a CPU, not on {device.type}"
    if engine.linear_backend == "native" and obstacle is not None:
        raise ConfigError(f"linear_backend=native cannot be used: {obstacle}; use auto or torch")
    if engine.linear_backend == "torch" or obstacle is not None:
        if engine.quantization != "none":
            raise ConfigError(
                f"quantization={engine.quantization} needs the native CPU kernels; use linear_backend native on a CPU"
            )
        return "torch", TorchOps(batch_invariant=engine.batch_invariant)
    from sonar_engine.layers.native import NativeOps

    # torch's own team would spin against ours after every large operation
    torch.set_num_threads(1)
    return "native", NativeOps(num_threads(engine), quantization=engine.quantization)
