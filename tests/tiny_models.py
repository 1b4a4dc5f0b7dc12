"""Tiny random checkpoints of every supported family, as transformers itself would save them.

`make_tiny("llama3", folder)` writes config.json and safetensors; `transformers_model(folder)` loads the reference.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A chat of every role, whose last message ends in a space.
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi!"},
    {"role": "assistant", "content": "Hello "},
]

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

# kind -> (configuration class, what differs from _COMMON)
_KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama2": (LlamaConfig, {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "llama3": (LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}),
    "linear": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "yarn": (LlamaConfig, {"rope_parameters": _YARN_ROPE}),
    "smollm": (
        LlamaConfig,
        {
            "hidden_size": 144,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
    ),
    "mistral": (MistralConfig, {"head_dim": 32, "sliding_window": None}),
    "mistral_window": (MistralConfig, {"sliding_window": 24}),
    "qwen2": (Qwen2Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_window": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": (
        Qwen3Config,
        {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
}

TINY_KINDS: tuple[str, ...] = tuple(_KINDS)


def make_tiny(
    kind: str,
    folder: str | os.PathLike[str],
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int | None = None,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Saves a random model of `kind` (see TINY_KINDS) into `folder` and returns it.

    `overrides` are fields of transformers' configuration. `shard_bytes` splits the weights into several
    safetensors files of at most that size with an index. `tokenizer` adds a byte-level tokenizer of at most
    `vocab_size` entries with a chat template, whose `<|im_end|>` has id 2.
    """
    config_class, fields = _KINDS[kind]
    config = config_class(**{**_COMMON, **fields, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _spread(model, seed)
    folder = Path(folder)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_bytes or "5GB")
    if tokenizer:
        make_tokenizer(config.vocab_size).save_pretrained(folder)
    return folder


def _spread(model: PreTrainedModel, seed: int) -> None:
    """Redraws every parameter wide enough that attention is peaked, logits spread and no two argmaxes tie."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith(".bias") or "embed" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)


def make_tokenizer(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2 and a chat template."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["the cat sat on the mat and the dog ate the other hat in the sun"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def transformers_model(folder: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The reference: transformers' model of a saved folder, eager attention, no gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval().requires_grad_(False)


@lru_cache(maxsize=2)
def transformers_smollm2(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' SmolLM2-135M over the dequantised weights of the default GGUF file, eager attention.

    The weights come through our loader, which is 10 times faster; `test_gguf` shows that transformers' own
    loader gives the very same tensors.
    """
    from sonar_engine.models.model_config import ModelConfig
    from sonar_engine.models.registry import resolve_model
    from sonar_engine.models.weights import load_weights

    path = resolve_model("smollm2-135m").path
    weights = load_weights(path, ModelConfig.from_gguf(path), dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(smollm2_config(), dtype=dtype, attn_implementation="eager")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    return model.eval().requires_grad_(False)


def smollm2_config() -> LlamaConfig:
    """The published configuration of SmolLM2-135M-Instruct."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
