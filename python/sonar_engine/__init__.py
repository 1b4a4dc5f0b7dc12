"""Sonar Engine: language model inference built around lossless speculative decoding.

The names below are imported on first use, so that `import sonar_engine` alone loads neither torch nor the extension.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonar_engine._scheduler import __version__
    from sonar_engine.config import EngineConfig, LossyConfig, SpeculativeConfig
    from sonar_engine.engine import Engine, build_engine
    from sonar_engine.types import Completion, RequestOutput, SamplingParams

_HOMES = {
    "__version__": "_scheduler",
    "Completion": "types",
    "Engine": "engine",
    "EngineConfig": "config",
    "LossyConfig": "config",
    "RequestOutput": "types",
    "SamplingParams": "types",
    "SpeculativeConfig": "config",
    "build_engine": "engine",
}

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "LossyConfig",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "__version__",
    "build_engine",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
