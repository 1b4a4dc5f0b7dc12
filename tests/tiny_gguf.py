"""Tiny GGUF files written by the `gguf` package from a tiny checkpoint, laid out as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from tiny_models import transformers_model
from transformers import PreTrainedModel

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}

Edit = Callable[[dict[str, np.ndarray]], None]


def gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    stem, _, end = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER[stem]}.{end}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row 2i of a head is row i of its first half, row 2i + 1 of its second: index by index."""
    head_dim = rows.shape[0] // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """fp32 arrays under GGUF names, q and k interleaved where the architecture wants it."""
    config = model.config
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if _ARCHITECTURES[config.model_type] == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = interleave(values, heads)
        tensors[gguf_name(name)] = values
    return tensors


def make_tiny_gguf(
    folder: Path,
    path: Path,
    quantisation: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    edit: Edit | None = None,
    metadata: dict[str, Any] | None = None,
    architecture: str | None = None,
) -> Path:
    """Converts the saved tiny model in `folder`; matrices are quantised, vectors stay fp32.

    `edit` changes the arrays first; `metadata` overrides keys below the architecture (None leaves one out).
    """
    model = transformers_model(folder)
    tensors = gguf_tensors(model)
    if edit is not None:
        edit(tensors)
    writer = gguf.GGUFWriter(path, architecture or _ARCHITECTURES[model.config.model_type])
    _write_metadata(writer, model.config, metadata or {})
    for name, values in tensors.items():
        if values.ndim == 1 or quantisation == GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
        else:
            data = gguf.quants.quantize(np.ascontiguousarray(values), quantisation)
            writer.add_tensor(name, data, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: gguf.GGUFWriter, config: Any, overrides: dict[str, Any]) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
        **overrides,
    }
    for key, value in values.items():
        full = f"{writer.arch}.{key}"
        if isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif value is not None:
            writer.add_uint32(full, value)


def add_tokenizer(writer: gguf.GGUFWriter, fields: dict[str, Any]) -> None:
    """Writes `tokenizer.ggml.*` fields; lists of strings, integers or floats become arrays."""
    for key, value in fields.items():
        full = key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_uint32(full, value)


def tokenizer_gguf(path: Path, fields: dict[str, Any]) -> Path:
    """A GGUF file with a vocabulary and no tensors worth loading."""
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, fields)
    writer.add_tensor("token_embd.weight", np.zeros((len(fields.get("tokens") or [0]), 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
