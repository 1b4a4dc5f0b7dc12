"""GGUF as a checkpoint: its metadata as a ModelConfig, its tensors under Hugging Face's names and layout.

llama.cpp's converter stores q and k of the `llama` architecture with each head's rotary pairs interleaved
(its `LlamaModel.permute`); Hugging Face keeps the two halves apart, so those rows are put back. The `qwen2` and
`qwen3` architectures are stored as Hugging Face has them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sonar_engine.errors import ModelLoadError
from sonar_engine.models.gguf_file import CHUNK_ELEMENTS, GgufFile
from sonar_engine.models.gguf_tokenizer import gguf_eos_ids, listed
from sonar_engine.models.model_config import MAX_LAYERS, ModelConfig, rope_scaling_of

# general.architecture -> family
_FAMILIES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
_INTERLEAVED = ("llama", "mistral")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"  # llama3 scaling, checked and folded into the configuration


class GgufCheckpoint:
    """Tensors of a GGUF file, dequantised a block at a time."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = GgufFile(path)
        self._config = config
        self._gguf_names = {hf_name(name): name for name in self._file.tensors if name != _ROPE_FREQS}
        self.shapes = {hf: self._file.tensors[name].shape for hf, name in self._gguf_names.items()}

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.__exit__()

    def read(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """fp32 blocks: (first index, values); q and k are held whole, since their rows change places."""
        gguf_name = self._gguf_names[name]
        heads = self._interleaved_heads(name)
        if len(self.shapes[name]) == 1:
            values = next(iter(self._file.rows(gguf_name)))[1].reshape(-1)
            yield 0, torch.from_numpy(_halves(values, heads) if heads else np.array(values))
        elif heads:
            whole = _halves(np.concatenate([rows for _, rows in self._file.rows(gguf_name)]), heads)
            step = max(1, CHUNK_ELEMENTS // whole.shape[1])
            for first in range(0, whole.shape[0], step):
                yield first, torch.from_numpy(whole[first : first + step])
        else:
            for first, rows in self._file.rows(gguf_name):
                yield first, torch.from_numpy(np.require(rows, requirements="W"))

    def _interleaved_heads(self, name: str) -> int | None:
        """The number of heads whose rows are interleaved in this tensor, None if they are not."""
        if self._config.family not in _INTERLEAVED:
            return None
        if ".q_proj." in name:
            return self._config.num_heads
        return self._config.num_kv_heads if ".k_proj." in name else None


def _halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from pair order (0a 0b 1a 1b ..) to half order (0a 1a .. 0b 1b ..)."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown one stays as it is."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return name
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def read_gguf_config(path: Path) -> ModelConfig:
    """The configuration that a GGUF file's metadata and tensor table describe."""
    with GgufFile(path) as file:
        return _config_of(file)


class _Metadata:
    """Typed access to `{architecture}.*` keys; complaints name the file and the key."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, where: str) -> None:
        self.metadata, self.architecture, self.where = metadata, architecture, where

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # one entry a layer, all the same
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            shown = "missing" if value is None else f"{value!r}; it must be a whole number from 1 to {most}"
            raise ModelLoadError(f"{self.where}: {self.architecture}.{key} is {shown}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelLoadError(f"{self.where}: {self.architecture}.{key} must be a positive number, not {value!r}")
        # The file holds fp32; the shortest decimal with that value is what the author wrote (1e-5, 10000.0).
        return float(str(np.float32(value)))


def _config_of(file: GgufFile) -> ModelConfig:
    where = str(file.path)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelLoadError(f"{where}: architecture {architecture!r} is not supported; supported are {known}")
    get = _Metadata(file.metadata, architecture, where)
    if get.get("expert_count"):
        raise ModelLoadError(f"{where}: mixture-of-experts models are not supported")
    family = _FAMILIES[architecture]
    hidden_size, num_heads = get.integer("embedding_length"), get.integer("attention.head_count")
    head_dim = _head_dim(get, hidden_size, num_heads)
    vocab_size = _vocab_size(file, get)
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=get.integer("feed_forward_length"),
        num_layers=get.integer("block_count", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=get.integer("attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        rms_norm_eps=get.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope_theta=get.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, get, head_dim),
        max_position_embeddings=get.integer("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias=family == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=family == "qwen3",
        sliding_window=get.integer("attention.sliding_window") if get.get("attention.sliding_window") else None,
        bos_token_id=_special_id(file, "bos_token_id", vocab_size),
        eos_token_ids=gguf_eos_ids(file.metadata, vocab_size, str(file.path)),
        torch_dtype=torch.float32 if file.metadata.get("general.file_type") == 0 else torch.bfloat16,
    )


def _head_dim(get: _Metadata, hidden_size: int, num_heads: int) -> int:
    if get.get("attention.key_length") is None and hidden_size % num_heads:
        raise ModelLoadError(
            f"{get.where}: embedding_length {hidden_size} is not divisible by attention.head_count {num_heads} "
            "and attention.key_length is missing"
        )
    head_dim = get.integer("attention.key_length", default=max(1, hidden_size // num_heads))
    rotated = get.integer("rope.dimension_count", default=head_dim)
    value_length = get.integer("attention.value_length", default=head_dim)
    if rotated != head_dim or value_length != head_dim:
        raise ModelLoadError(
            f"{get.where}: heads of {head_dim} with rope.dimension_count {rotated} and value_length {value_length} "
            "are not supported; the three must be equal"
        )
    return head_dim


def _vocab_size(file: GgufFile, get: _Metadata) -> int:
    embedding = file.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None else len(listed(file.metadata, "tokenizer.ggml.tokens"))
    return get.integer("vocab_size", default=max(1, rows))


def _special_id(file: GgufFile, key: str, vocab_size: int) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, int) and 0 <= value < vocab_size else None


def _rope_scaling(file: GgufFile, get: _Metadata, head_dim: int) -> dict[str, Any] | None:
    context_length = get.integer("context_length")
    if _ROPE_FREQS in file.tensors:
        return _llama3_scaling(file, head_dim, get)
    kind = get.get("rope.scaling.type")
    factor = get.number("rope.scaling.factor", get.number("rope.scale_linear", 1.0))
    if kind in (None, "none") and factor == 1.0:
        return None
    parameters: dict[str, Any] = {
        "rope_type": kind or "linear",
        "factor": factor,
        "original_max_position_embeddings": get.get("rope.scaling.original_context_length"),
    }
    if kind == "yarn":
        # llama.cpp multiplies its own 0.1 ln(factor) + 1 by this; transformers takes the product.
        multiplier = get.number("rope.scaling.attn_factor", 1.0)
        parameters["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1.0) if factor > 1 else multiplier
        parameters["beta_fast"] = get.number("rope.scaling.yarn_beta_fast", 32.0)
        parameters["beta_slow"] = get.number("rope.scaling.yarn_beta_slow", 1.0)
    return rope_scaling_of(parameters, context_length, get.where)


def _llama3_scaling(file: GgufFile, head_dim: int, get: _Metadata) -> dict[str, Any]:
    """Finds the llama3 parameters whose divisors the file's rope_freqs tensor holds (Llama 3.1: 8, 3.2: 32)."""
    stored = next(iter(file.rows(_ROPE_FREQS)))[1].reshape(-1)
    scaling = {
        "kind": "llama3",
        "factor": round(float(stored.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    computed = _llama3_divisors(scaling, head_dim, get.number("rope.freq_base", 10000.0))
    if stored.shape != computed.shape or not np.allclose(stored, computed, rtol=1e-3):
        raise ModelLoadError(f"{file.path}: {_ROPE_FREQS} is not the scaling of Llama 3; other kinds are not supported")
    return scaling


def _llama3_divisors(scaling: Mapping[str, Any], head_dim: int, theta: float) -> np.ndarray:
    """[head_dim / 2]: what llama3 scaling divides each rotary frequency by (transformers' rope_type llama3)."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] / wavelength
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1 - smooth) / scaling["factor"] + smooth)
