"""Rotary position tables: default, linear, llama3 and yarn scaling, with the numbers of transformers 5.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), Llama 3.1's published configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sonar_engine.errors import ModelLoadError
from sonar_engine.models.model_config import ModelConfig


def build_cos_sin(config: ModelConfig, num_positions: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The table that `Ops.rope` reads: fp32 [num_positions, 2, head_dim / 2], index 0 cosine, 1 sine.

    The attention factor of yarn is multiplied in. Computed on the CPU, so that every device gets the same bits.
    """
    inverse_frequencies, attention_factor = rope_frequencies(config)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies  # [num_positions, D/2]
    table = torch.stack((angles.cos() * attention_factor, angles.sin() * attention_factor), dim=1)
    return table.contiguous().to(device)


def rope_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """(fp32 [head_dim / 2] radians a position, the factor that multiplies cosine and sine)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
    wavelength_ratios = config.rope_theta**exponents  # radians^-1
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0 / wavelength_ratios, 1.0
    kind = scaling["kind"]
    if kind == "linear":
        return (1.0 / wavelength_ratios) / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3_frequencies(1.0 / wavelength_ratios, scaling), 1.0
    if kind == "yarn":
        return _yarn_frequencies(wavelength_ratios, config, scaling), _yarn_attention_factor(scaling)
    raise ModelLoadError(f"rope scaling {kind!r} is not supported; supported are linear, llama3, yarn")


def _llama3_frequencies(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended linearly."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original_len = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    blend = (original_len / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    is_long = wavelengths > original_len / low
    is_short = wavelengths < original_len / high
    return torch.where(is_long, frequencies / factor, torch.where(is_short, frequencies, blended))


def _yarn_frequencies(wavelength_ratios: torch.Tensor, config: ModelConfig, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Dimensions that turn often keep their frequency, those that turn rarely are interpolated, a ramp between."""
    low, high = _yarn_ramp(config, scaling)
    indices = torch.arange(config.head_dim // 2, dtype=torch.float32)
    keep = 1 - torch.clamp((indices - low) / (high - low), 0, 1)
    interpolated = 1.0 / (scaling["factor"] * wavelength_ratios)
    return interpolated * (1 - keep) + (1.0 / wavelength_ratios) * keep


def _yarn_ramp(config: ModelConfig, scaling: Mapping[str, Any]) -> tuple[float, float]:
    """Dimension indices where `beta_fast` and `beta_slow` rotations fit into the original context."""

    def dimension(rotations: float) -> float:
        span = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return config.head_dim * math.log(span) / (2 * math.log(config.rope_theta))

    low = dimension(scaling.get("beta_fast") or 32.0)
    high = dimension(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _yarn_mscale(scaling["factor"], mscale) / _yarn_mscale(scaling["factor"], mscale_all_dim)
    return _yarn_mscale(scaling["factor"], 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
