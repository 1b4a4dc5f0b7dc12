"""Folders of configuration and weights: every family loads exactly, every kind of damage is one clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading import fails_with, load
from safetensors.torch import load_file, save_file
from sonar_engine.errors import ModelLoadError
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.weights import load_weights
from tiny_models import TINY_KINDS, make_tiny, transformers_model


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of a tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> Path:
    """Rewrites config.json; a value of `...` removes the key."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw.update(changes)
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return folder


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


# --- folders that are right


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_every_family_loads_the_tensors_that_transformers_has(kind: str, tmp_path: Path) -> None:
    folder = make_tiny(kind, tmp_path)
    reference = transformers_model(folder).state_dict()
    weights = load(folder)
    assert set(reference) - set(weights) <= {"lm_head.weight"}
    assert all(torch.equal(weights[name], reference[name]) for name in weights)


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_the_configuration_says_what_transformers_says(kind: str, tmp_path: Path) -> None:
    folder = make_tiny(kind, tmp_path)
    reference = transformers_model(folder).config
    config = ModelConfig.from_hf(folder)
    assert config.hidden_size == reference.hidden_size
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.rope_theta == reference.rope_parameters["rope_theta"]
    assert (config.rope_scaling or {"kind": "default"})["kind"] == reference.rope_parameters["rope_type"]
    for key, value in (config.rope_scaling or {}).items():
        assert key == "kind" or reference.rope_parameters[key] == value
    types = getattr(reference, "layer_types", None) or ["full_attention"] * config.num_layers
    if kind == "mistral_window":
        types = ["sliding_attention"] * config.num_layers
    assert [w is not None for w in config.layer_windows] == [t == "sliding_attention" for t in types]
    assert config.tie_word_embeddings == reference.tie_word_embeddings


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    one, many = make_tiny("qwen2", tmp_path / "one"), make_tiny("qwen2", tmp_path / "many", shard_bytes=60_000)
    assert len(list(many.glob("*.safetensors"))) > 2
    left, right = load(one), load(many)
    assert list(left) == list(right)
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_come_in_the_asked_dtype_and_the_progress_ends_at_the_total(
    tiny_llama: Path, dtype: torch.dtype
) -> None:
    seen: list[tuple[int, int]] = []
    config = ModelConfig.from_hf(tiny_llama)
    weights = load_weights(tiny_llama, config, dtype, progress=lambda done, total: seen.append((done, total)))
    original = load_file(tiny_llama / "model.safetensors")
    assert all(torch.equal(weights[name], original[name].to(dtype)) for name in weights)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (sum(t.numel() for t in weights.values()),) * 2


def test_weights_do_not_change_when_the_file_does(copy: Path) -> None:
    weights = load(copy)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    path = copy / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 4096)
    assert all(torch.equal(weights[name], before[name]) for name in weights)


def test_a_saved_rotary_buffer_is_ignored(copy: Path) -> None:
    edit_tensors(copy, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in load(copy)


def test_a_tied_head_may_be_present_if_it_is_equal(tmp_path: Path) -> None:
    folder = make_tiny("smollm", tmp_path)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in load(folder)
    edit_tensors(folder, lambda t: t["lm_head.weight"].mul_(2))
    fails_with(lambda: load(folder), "tie_word_embeddings", "lm_head.weight differs")


# --- tensors that do not fit


def test_missing_unknown_and_misshapen_tensors_are_one_error_that_names_them(copy: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.surprise"] = torch.ones(3)
        tensors["model.norm.weight"] = torch.ones(7)

    edit_tensors(copy, damage)
    fails_with(
        lambda: load(copy),
        "1 missing: model.layers.1.mlp.up_proj.weight",
        "1 unknown: model.layers.0.surprise",
        "1 misshapen: model.norm.weight is [7], expected [64]",
    )


def test_a_long_list_of_bad_tensors_is_cut_and_counted(copy: Path) -> None:
    edit_config(copy, num_hidden_layers=40)
    fails_with(lambda: load(copy), "342 missing: model.layers.2.", "and 337 more")


def test_an_untied_model_without_a_head_is_refused(copy: Path) -> None:
    edit_tensors(copy, lambda t: t.pop("lm_head.weight"))
    fails_with(lambda: load(copy), "1 missing: lm_head.weight")


def test_integer_tensors_are_refused(copy: Path) -> None:
    edit_tensors(copy, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    fails_with(lambda: load(copy), "model.norm.weight", "I8")


# --- files that are damaged or absent


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.99])
def test_a_truncated_safetensors_file_is_refused(copy: Path, keep: float) -> None:
    path = copy / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    fails_with(lambda: load(copy), str(path), "truncated or damaged")


def test_damaged_shards_and_indexes_are_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path, shard_bytes=60_000)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def with_map(weight_map: Any) -> None:
        index.write_text(json.dumps({**good, "weight_map": weight_map}))

    with_map({**good["weight_map"], "model.ghost": sorted(good["weight_map"].values())[0]})
    fails_with(lambda: load(folder), "1 tensors that no shard holds", "model.ghost")
    with_map({**good["weight_map"], "model.norm.weight": "../elsewhere.safetensors"})
    fails_with(lambda: load(folder), "../elsewhere.safetensors")
    with_map([])
    fails_with(lambda: load(folder), "weight_map")
    index.write_text("{")
    fails_with(lambda: load(folder), str(index), "JSON")
    with_map(good["weight_map"])
    lost = folder / sorted(set(good["weight_map"].values()))[1]
    lost.unlink()
    fails_with(lambda: load(folder), f"{lost} is missing")


def test_pickled_weights_are_never_loaded(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    fails_with(lambda: load(copy), "convert them to safetensors")


def test_a_folder_without_weights_or_no_folder_at_all_is_refused(copy: Path) -> None:
    config = ModelConfig.from_hf(copy)
    (copy / "model.safetensors").unlink()
    fails_with(lambda: load(copy), "model.safetensors")
    (copy / "some.gguf").write_bytes(b"GGUF")
    fails_with(lambda: load(copy), "some.gguf")
    fails_with(lambda: load_weights(copy / "nowhere", config, torch.float32), "is not a folder")
    fails_with(lambda: ModelConfig.from_hf(copy / "nowhere"), "config.json is missing")


# --- configurations


def test_an_unknown_architecture_lists_the_supported_ones(copy: Path) -> None:
    edit_config(copy, architectures=["GPT2LMHeadModel"])
    fails_with(lambda: ModelConfig.from_hf(copy), "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM")
    edit_config(copy, architectures=..., model_type="mamba")
    fails_with(lambda: ModelConfig.from_hf(copy), "mamba", "MistralForCausalLM")


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_a_missing_key_is_named(copy: Path, key: str) -> None:
    fails_with(lambda: ModelConfig.from_hf(edit_config(copy, **{key: ...})), f"{key} is missing")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_key_value_heads": 3}, ("num_attention_heads (4)", "num_key_value_heads (3)")),
        ({"num_attention_heads": 0}, ("num_attention_heads", "0")),
        ({"hidden_size": "64"}, ("hidden_size", "'64'")),
        ({"num_hidden_layers": 2**30}, ("num_hidden_layers", "4096")),
        ({"head_dim": 15}, ("head_dim", "15")),
        ({"head_dim": ..., "hidden_size": 66}, ("hidden_size 66", "num_attention_heads 4")),
        ({"rms_norm_eps": -1}, ("rms_norm_eps", "-1")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"rope_parameters": {"rope_type": "longrope"}}, ("longrope", "llama3")),
        ({"rope_parameters": {"rope_type": "linear"}}, ("factor",)),
        ({"rope_parameters": [1]}, ("rope_parameters", "[1]")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
        ({"eos_token_id": 320}, ("320",)),
        ({"eos_token_id": "two"}, ("eos_token_id", "'two'")),
        ({"dtype": "int4"}, ("int4", "bfloat16")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("gptq", "unquantised")),
        ({"quantization_config": {"quant_method": "fp8"}}, ("fp8",)),
        ({"tie_word_embeddings": "no"}, ("tie_word_embeddings",)),
    ],
)
def test_nonsense_in_the_configuration_is_named(copy: Path, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    edit_config(copy, **changes)
    fails_with(lambda: ModelConfig.from_hf(copy), *parts)


def test_a_configuration_that_is_not_json_is_refused(copy: Path) -> None:
    for text in ("{", "[]", "\x00", "[" * 100_000):
        (copy / "config.json").write_text(text)
        fails_with(lambda: ModelConfig.from_hf(copy), "config.json")


def test_rope_scaling_reads_the_older_spelling_too(copy: Path) -> None:
    scaling = {"type": "linear", "factor": 4.0}
    edit_config(copy, rope_parameters=..., rope_theta=5000.0, rope_scaling=scaling)
    config = ModelConfig.from_hf(copy)
    assert (config.rope_theta, config.rope_scaling) == (5000.0, {"kind": "linear", "factor": 4.0})
    edit_config(copy, rope_scaling={"rope_type": "yarn", "factor": 2.0})
    assert ModelConfig.from_hf(copy).rope_scaling == {
        "kind": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 512,
    }


def test_generation_defaults_and_stop_ids_come_from_both_files(copy: Path) -> None:
    generation = {"eos_token_id": [7, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}
    (copy / "generation_config.json").write_text(json.dumps(generation))
    config = ModelConfig.from_hf(copy)
    assert config.eos_token_ids == (7, 2)
    assert config.generation_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize(
    ("generation", "part"),
    [
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"top_k": True}, "top_k must be an integer, not True"),
        ({"top_k": 2.5}, "top_k must be an integer, not 2.5"),
        ({"top_p": [0.5]}, "top_p must be a number"),
        ({"min_p": 2}, "min_p must be at least 0 and at most 1"),
        ({"repetition_penalty": {}}, "repetition_penalty must be a number"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id or a list of them, not 'x'"),
        ({"eos_token_id": [2, None]}, "eos_token_id must be a token id or a list of them"),
    ],
)
def test_a_wrong_value_in_generation_config_names_the_file_and_the_field(
    copy: Path, generation: dict[str, Any], part: str
) -> None:
    path = copy / "generation_config.json"
    path.write_text(json.dumps(generation))
    fails_with(lambda: ModelConfig.from_hf(copy), f"{path}: {part}")


def test_nulls_in_generation_config_count_as_absent(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"temperature": null, "top_k": null, "eos_token_id": null}')
    config = ModelConfig.from_hf(copy)
    assert (config.generation_defaults, config.eos_token_ids) == ({}, (2,))


def test_qwen_windows_only_the_layers_it_names(tmp_path: Path) -> None:
    folder = make_tiny("qwen2_window", tmp_path)
    assert ModelConfig.from_hf(folder).layer_windows == (None, 24, 24)
    edit_config(folder, layer_types=...)
    assert ModelConfig.from_hf(folder).layer_windows == (None, 24, 24)
    edit_config(folder, use_sliding_window=False)
    assert ModelConfig.from_hf(folder).layer_windows == (None, None, None)


JSON_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just([]) | st.just({})
JSON_NESTED = (
    JSON_VALUES | st.lists(JSON_VALUES, max_size=3) | st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=2)
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_any_key_is_taken_or_refused_by_name(copy: Path, tiny_llama: Path, data: st.DataObject) -> None:
    raw = json.loads((tiny_llama / "config.json").read_text())
    rope = raw["rope_parameters"]
    key = data.draw(st.sampled_from([*sorted(raw), *(f"rope.{k}" for k in [*rope, "factor"])]))
    value = data.draw(JSON_NESTED)
    if key.startswith("rope."):
        rope[key[5:]] = value
    else:
        raw[key] = value
    (copy / "config.json").write_text(json.dumps(raw))
    try:
        ModelConfig.from_hf(copy)
    except ModelLoadError as error:
        assert "\n" not in str(error)
