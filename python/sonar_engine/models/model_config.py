"""The shape of a model, read once from config.json or GGUF metadata and checked before any weight is touched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sonar_engine.errors import InvalidRequestError, ModelLoadError
from sonar_engine.sampling.validation import validate_for_any_model
from sonar_engine.types import SamplingParams

MAX_LAYERS = 4096  # more is a damaged file
SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_GENERATION_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Required and optional parameters of each rope kind, in transformers' spelling.
_ROPE_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family. Sizes in elements, lengths in tokens.

    `rope_scaling` is None or `{"kind": "linear" | "llama3" | "yarn", ...parameters in transformers' spelling}`.
    `sliding_window` is the number of tokens a windowed layer sees (itself included); `layer_windows[i]` is that
    number or None (full attention) for layer i. `num_nextn_predict_layers` further layers in the checkpoint are draft
    heads that the model was trained with. `generation_defaults` holds what generation_config.json sets of
    temperature, top_k, top_p, min_p and repetition_penalty. `torch_dtype` is the checkpoint's own dtype
    (bfloat16 for quantised GGUF files).
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    layer_windows: tuple[int | None, ...] = ()
    num_nextn_predict_layers: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    torch_dtype: torch.dtype = torch.bfloat16
    generation_defaults: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (self.sliding_window,) * self.num_layers)
        _check(self)

    @classmethod
    def from_hf(cls, folder: str | Path) -> ModelConfig:
        """Reads config.json and, if present, generation_config.json of a Hugging Face folder."""
        folder = Path(folder)
        raw = read_json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        return cls.from_dict(raw, str(folder / "config.json"), JsonFields(generation, str(generation_path)))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str, generation: JsonFields | None = None) -> ModelConfig:
        """From the objects in config.json and generation_config.json; `where` names the former in errors."""
        return _from_hf_dict(raw, generation or JsonFields({}, "generation_config.json"), where)

    def to_dict(self) -> dict[str, Any]:
        """What transformers' config.json holds; `from_dict` reads it back, but for `generation_defaults`."""
        return {
            "architectures": [next(name for name, family in _ARCHITECTURES.items() if family == self.family)],
            "model_type": self.family,
            **self.layers_dict(),
            "hidden_act": "silu",
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
        }

    def layers_dict(self) -> dict[str, Any]:
        """The part of `to_dict` that says what the layers are like."""
        scaling = dict(self.rope_scaling or {"kind": "default"})
        result = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": {"rope_type": scaling.pop("kind"), "rope_theta": self.rope_theta, **scaling},
            "attention_bias": self.qkv_bias,
            "mlp_bias": self.mlp_bias,
            "dtype": str(self.torch_dtype).removeprefix("torch."),
            "sliding_window": self.sliding_window,
        }
        if self.sliding_window is not None:
            types = ["full_attention" if window is None else "sliding_attention" for window in self.layer_windows]
            result |= {"use_sliding_window": True, "layer_types": types}
        return result

    @classmethod
    def from_gguf(cls, path: str | Path) -> ModelConfig:
        """Reads the metadata of a GGUF file."""
        from sonar_engine.models.gguf_weights import read_gguf_config

        return read_gguf_config(Path(path))

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """`from_gguf` for a .gguf file, else `from_hf`."""
        path = Path(path)
        return cls.from_gguf(path) if path.suffix == ".gguf" else cls.from_hf(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model; ModelLoadError when it is missing or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing; a model folder needs it beside its safetensors files") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def unsupported_architecture(found: object, where: str) -> ModelLoadError:
    known = ", ".join(sorted(_ARCHITECTURES))
    return ModelLoadError(f"{where}: architecture {found!r} is not supported; supported are {known}")


class JsonFields:
    """Typed access to one JSON object; every complaint names the file and the key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelLoadError(f"{self.where}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ModelLoadError(f"{self.where}: {key} must be a whole number from {least} to {most}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ModelLoadError(f"{self.where}: {key} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self.where}: {key} must be true or false, not {value!r}")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing."""
        value = self.raw.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise ModelLoadError(f"{self.where}: {key} must be a token id or a list of them, not {value!r}")
        return tuple(dict.fromkeys(values))


def _from_hf_dict(raw: Mapping[str, Any], generation: JsonFields, where: str) -> ModelConfig:
    family = _family(raw, where)
    _refuse_quantised(raw, where)
    get = JsonFields(raw, where)
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"{where}: hidden_act {activation!r} is not supported; it must be 'silu'")
    num_layers, num_heads = get.integer("num_hidden_layers", most=MAX_LAYERS), get.integer("num_attention_heads")
    hidden_size = get.integer("hidden_size")
    max_position_embeddings = get.integer("max_position_embeddings", default=2048)
    rope_theta, rope_scaling = _rope(raw, max_position_embeddings, where)
    window, layer_windows = _windows(raw, get, family, num_layers)
    bias = get.flag("attention_bias")
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=get.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=get.integer("num_key_value_heads", default=num_heads),
        head_dim=_head_dim(get, family, hidden_size, num_heads),
        vocab_size=get.integer("vocab_size"),
        rms_norm_eps=get.number("rms_norm_eps", default=1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=get.flag("tie_word_embeddings"),
        qkv_bias=bias if family in ("llama", "qwen3") else family == "qwen2",
        o_bias=bias if family in ("llama", "qwen3") else False,
        mlp_bias=get.flag("mlp_bias") if family == "llama" else False,
        qk_norm=family == "qwen3",
        sliding_window=window,
        layer_windows=layer_windows,
        num_nextn_predict_layers=get.integer("num_nextn_predict_layers", default=0, least=0, most=MAX_LAYERS),
        bos_token_id=next(iter(get.ids("bos_token_id")), None),
        eos_token_ids=_eos_ids(get, generation),
        torch_dtype=_dtype(raw, where),
        generation_defaults=_generation_defaults(generation),
    )


def _family(raw: Mapping[str, Any], where: str) -> str:
    names = raw.get("architectures") or []
    if names:
        name = names[0] if isinstance(names, list) else names
        if not isinstance(name, str) or name not in _ARCHITECTURES:
            raise unsupported_architecture(name, where)
        return _ARCHITECTURES[name]
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in SUPPORTED_FAMILIES:
        raise unsupported_architecture(family, where)
    return family


def _refuse_quantised(raw: Mapping[str, Any], where: str) -> None:
    quantisation = raw.get("quantization_config") or raw.get("compression_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else quantisation
        raise ModelLoadError(
            f"{where}: weights quantised by {method!r} are not supported; use the unquantised checkpoint or a GGUF file"
        )


def _head_dim(get: JsonFields, family: str, hidden_size: int, num_heads: int) -> int:
    if get.raw.get("head_dim") is not None:
        return get.integer("head_dim")
    if family == "qwen3":
        return 128  # the default of transformers' Qwen3Config
    if hidden_size % num_heads:
        raise ModelLoadError(
            f"{get.where}: hidden_size {hidden_size} is not divisible by num_attention_heads {num_heads} "
            "and head_dim is missing"
        )
    return hidden_size // num_heads


def _rope(raw: Mapping[str, Any], max_position_embeddings: int, where: str) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (older)."""
    parameters = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    for key, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise ModelLoadError(f"{where}: {key} must be an object, not {value!r}")
    merged = {**scaling, **parameters}
    merged.setdefault("rope_theta", raw.get("rope_theta"))
    theta = JsonFields(merged, where).number("rope_theta", 10000.0)
    merged.setdefault("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if JsonFields(merged, where).number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError(f"{where}: partial_rotary_factor other than 1 is not supported")
    merged.setdefault("original_max_position_embeddings", raw.get("original_max_position_embeddings"))
    return theta, rope_scaling_of(merged, max_position_embeddings, where)


def rope_scaling_of(parameters: Mapping[str, Any], max_position_embeddings: int, where: str) -> dict[str, Any] | None:
    """Normalises rope parameters to `{"kind": ..., ...}`, or None for plain rotary embeddings."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _ROPE_KINDS:
        raise ModelLoadError(f"{where}: rope scaling {kind!r} is not supported; supported are {', '.join(_ROPE_KINDS)}")
    required, optional = _ROPE_KINDS[kind]
    get = JsonFields(parameters, where)
    result: dict[str, Any] = {"kind": kind}
    for key in required:
        if key == "original_max_position_embeddings":
            result[key] = get.integer(key, default=max_position_embeddings)
        else:
            result[key] = get.number(key)
    for key in optional:
        if parameters.get(key) is not None:
            result[key] = get.flag(key) if key == "truncate" else get.number(key)
    return result


def _windows(
    raw: Mapping[str, Any], get: JsonFields, family: str, num_layers: int
) -> tuple[int | None, tuple[int | None, ...]]:
    """The window, and for each layer the window or None.

    Mistral windows every layer; Qwen only with `use_sliding_window`, from layer `max_window_layers` on, unless
    `layer_types` names each layer.
    """
    enabled = family == "mistral" or (family in ("qwen2", "qwen3") and get.flag("use_sliding_window"))
    if not enabled or raw.get("sliding_window") is None:
        return None, (None,) * num_layers
    window = get.integer("sliding_window")
    types = raw.get("layer_types")
    if types is None:
        first = get.integer("max_window_layers", default=28, least=0) if family != "mistral" else 0
        return window, tuple(window if i >= first else None for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelLoadError(f"{get.where}: layer_types must list {num_layers} layers")
    unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelLoadError(f"{get.where}: layer type {unknown[0]!r} is not supported")
    return window, tuple(window if t == "sliding_attention" else None for t in types)


def _eos_ids(config: JsonFields, generation: JsonFields) -> tuple[int, ...]:
    """generation_config.json adds to config.json: chat models often end a turn with a token only the former names."""
    return tuple(dict.fromkeys((*generation.ids("eos_token_id"), *config.ids("eos_token_id"))))


def _dtype(raw: Mapping[str, Any], where: str) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in _DTYPES:
        raise ModelLoadError(f"{where}: dtype {name!r} is not supported; supported are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _generation_defaults(generation: JsonFields) -> dict[str, float]:
    """Sampling defaults that the model's authors set. They obey the rules of a request, which takes them over."""
    found = {key: generation.raw[key] for key in _GENERATION_KEYS if generation.raw.get(key) is not None}
    try:
        validate_for_any_model(SamplingParams(**found))
    except InvalidRequestError as error:
        raise ModelLoadError(f"{generation.where}: {error}; correct it or take it out") from None
    return {key: value if key == "top_k" else float(value) for key, value in found.items()}


def _check(config: ModelConfig) -> None:
    """What must hold between the numbers, whichever file they came from."""
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"num_attention_heads ({config.num_heads}) must be a multiple of "
            f"num_key_value_heads ({config.num_kv_heads})"
        )
    if config.head_dim % 2:
        raise ModelLoadError(f"head_dim must be even for rotary embeddings, not {config.head_dim}")
    if len(config.layer_windows) != config.num_layers:
        raise ModelLoadError(f"layer_windows has {len(config.layer_windows)} entries for {config.num_layers} layers")
    outside = [i for i in (*config.eos_token_ids, config.bos_token_id) if i is not None and i >= config.vocab_size]
    if outside:
        raise ModelLoadError(f"special token ids {outside} are outside the vocabulary of {config.vocab_size}")
