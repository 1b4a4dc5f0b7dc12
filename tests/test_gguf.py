"""GGUF files: what a file was made of comes back exactly, damage is one clear error, the default model loads whole."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loading import fails_with, load
from sonar_engine.errors import ModelLoadError
from sonar_engine.models.gguf_file import GgufFile
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.weights import expected_shapes
from tiny_gguf import gguf_tensors, make_tiny_gguf
from tiny_models import make_tiny, transformers_model, transformers_smollm2

QUANTISATIONS = [
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q8_0,
]


@pytest.mark.parametrize("kind", ["llama2", "smollm", "qwen2", "qwen3"])
def test_a_gguf_file_gives_back_the_checkpoint_it_was_made_of(kind: str, tmp_path: Path) -> None:
    folder = make_tiny(kind, tmp_path / "hf")
    path = make_tiny_gguf(folder, tmp_path / "tiny.gguf")
    expected, found = load(folder), load(path)
    assert list(expected) == list(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    left, right = ModelConfig.from_hf(folder), ModelConfig.from_gguf(path)
    for name in (
        "head_dim",
        "num_kv_heads",
        "rms_norm_eps",
        "rope_theta",
        "tie_word_embeddings",
        "qkv_bias",
        "qk_norm",
    ):
        assert getattr(left, name) == getattr(right, name)


@pytest.mark.parametrize("quantisation", QUANTISATIONS, ids=lambda q: q.name)
def test_quantised_matrices_are_what_the_gguf_package_dequantises(
    quantisation: GGMLQuantizationType, tmp_path: Path
) -> None:
    folder = make_tiny("qwen2", tmp_path / "hf", intermediate_size=128)
    path = make_tiny_gguf(folder, tmp_path / "tiny.gguf", quantisation)
    weights = load(path)
    original = transformers_model(folder).state_dict()
    for name, tensor in original.items():
        values = tensor.numpy()
        if tensor.ndim == 2:
            values = gguf.quants.dequantize(gguf.quants.quantize(values, quantisation), quantisation)
        assert np.array_equal(weights[name].numpy(), values), name


@pytest.mark.parametrize(
    "quantisation", [GGMLQuantizationType[f"Q{n}_K"] for n in (2, 3, 4, 5, 6)], ids=lambda q: q.name
)
def test_k_quants_load(quantisation: GGMLQuantizationType, tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path / "hf", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    elements, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    raw = np.random.default_rng(0).integers(0, 60, (256, 256 // elements * block_bytes), dtype=np.uint8)
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length"):
        writer.add_uint32(f"llama.{key}", 1 if key == "block_count" else 64)
    for key in ("embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 256)
    writer.add_uint32("llama.attention.head_count", 4)
    for name, values in gguf_tensors(transformers_model(folder)).items():
        if name == "blk.0.ffn_up.weight":
            writer.add_tensor(name, raw, raw_dtype=quantisation)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = load(path)["model.layers.0.mlp.up_proj.weight"].numpy()
    assert np.array_equal(found, gguf.quants.dequantize(raw, quantisation))


@pytest.mark.parametrize("kind", ["llama2", "qwen2"])
def test_transformers_reads_the_same_tensors_from_a_gguf_file(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny(kind, tmp_path / "hf", intermediate_size=128)
    path = make_tiny_gguf(folder, tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).state_dict()
    weights = load(path)
    assert all(torch.equal(weights[name], reference[name]) for name in weights)


def test_large_tensors_are_dequantised_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("smollm", tmp_path / "hf")
    path = make_tiny_gguf(folder, tmp_path / "tiny.gguf", GGMLQuantizationType.F16)
    whole = load(path)
    monkeypatch.setattr("sonar_engine.models.gguf_file.CHUNK_ELEMENTS", 1000)
    blocks = load(path)
    assert all(torch.equal(whole[name], blocks[name]) for name in whole)


@pytest.fixture(scope="module")
def gguf_bytes(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_tiny_gguf(tiny_llama, tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def test_a_gguf_file_cut_anywhere_is_refused(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for keep in [*range(0, 3000, 97), len(gguf_bytes) // 2, len(gguf_bytes) - 33]:
        path.write_bytes(gguf_bytes[:keep])
        fails_with(lambda: load(path), str(path))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_gguf_header_with_any_bytes_changed_loads_or_is_refused(
    gguf_bytes: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    damaged = bytearray(gguf_bytes)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, 2500))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        load(path)
    except ModelLoadError as error:
        assert str(error)


@pytest.mark.parametrize(("offset", "message"), [(3, "no multiple of 32"), (0, "overlaps")])
def test_a_gguf_tensor_at_an_impossible_place_is_named(
    gguf_bytes: bytes, tmp_path: Path, offset: int, message: str
) -> None:
    name = b"blk.1.ffn_up.weight"
    at = gguf_bytes.index(name) + len(name) + 4 + 2 * 8 + 4  # behind the number of dimensions, two of them, the type
    path = tmp_path / "misplaced.gguf"
    path.write_bytes(gguf_bytes[:at] + offset.to_bytes(8, "little") + gguf_bytes[at + 8 :])
    fails_with(lambda: load(path), message)


def test_a_gguf_tensor_of_a_wrong_shape_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    def widen(tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.1.ffn_up.weight"] = np.zeros((9, 64), np.float32)

    path = make_tiny_gguf(tiny_llama, tmp_path / "wrong.gguf", edit=widen)
    fails_with(lambda: load(path), "model.layers.1.mlp.up_proj.weight is [9, 64], expected [112, 64]")


def test_an_unknown_gguf_tensor_or_architecture_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    path = make_tiny_gguf(tiny_llama, tmp_path / "a.gguf", edit=lambda t: t.update(surprise=np.ones(3, np.float32)))
    fails_with(lambda: load(path), "1 unknown: surprise")
    path = make_tiny_gguf(tiny_llama, tmp_path / "b.gguf", architecture="gemma3")
    fails_with(lambda: load(path), "gemma3", "llama, mistral, qwen2, qwen3")
    path = make_tiny_gguf(tiny_llama, tmp_path / "c.gguf", metadata={"block_count": None})
    fails_with(lambda: load(path), "llama.block_count is missing")
    path = make_tiny_gguf(tiny_llama, tmp_path / "d.gguf", metadata={"expert_count": 8})
    fails_with(lambda: load(path), "mixture-of-experts")


def test_gguf_rope_scaling_is_read(tiny_llama: Path, tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = make_tiny_gguf(tiny_llama, tmp_path / "linear.gguf", metadata=linear)
    assert ModelConfig.from_gguf(path).rope_scaling == {"kind": "linear", "factor": 4.0}
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 256}
    scaling = ModelConfig.from_gguf(make_tiny_gguf(tiny_llama, tmp_path / "yarn.gguf", metadata=yarn)).rope_scaling
    assert scaling is not None
    assert scaling["original_max_position_embeddings"] == 256
    assert scaling["attention_factor"] == pytest.approx(0.1 * np.log(2.0) + 1)


def test_gguf_llama3_divisors_become_llama3_scaling(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    folder = make_tiny("llama3", tmp_path / "hf", head_dim=64)
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 50000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 50000.0 ** (-torch.arange(0, 64, 2) / 64)
    divisors = (plain / scaled).numpy().astype(np.float32)
    path = make_tiny_gguf(folder, tmp_path / "a.gguf", edit=lambda t: t.update({"rope_freqs.weight": divisors}))
    scaling = ModelConfig.from_gguf(path).rope_scaling
    assert scaling == {"kind": "llama3", **{k: v for k, v in parameters.items() if not k.startswith("rope_")}}
    assert "rope_freqs.weight" not in load(path)
    path = make_tiny_gguf(folder, tmp_path / "b.gguf", edit=lambda t: t.update({"rope_freqs.weight": divisors[::-1]}))
    fails_with(lambda: ModelConfig.from_gguf(path), "rope_freqs.weight")


# --- the default model


def test_the_default_model_loads_whole_and_is_what_its_file_holds() -> None:
    from sonar_engine.models.registry import resolve_model

    path = resolve_model("smollm2-135m").path
    config = ModelConfig.from_gguf(path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.rms_norm_eps, config.rope_theta, config.tie_word_embeddings) == (1e-5, 100000.0, True)
    assert {2} <= set(config.eos_token_ids)
    reference = transformers_smollm2().state_dict()
    assert set(expected_shapes(config)) == set(reference) - {"lm_head.weight"}
    with GgufFile(path) as file:
        stored = np.concatenate([rows for _, rows in file.rows("blk.7.attn_k.weight")])
    # Row 2i of a stored head is row i of the first half, row 2i + 1 row i of the second.
    head, pair = 2, 5
    found = reference["model.layers.7.self_attn.k_proj.weight"].numpy()
    assert np.array_equal(found[head * 64 + pair], stored[head * 64 + 2 * pair])
    assert np.array_equal(found[head * 64 + 32 + pair], stored[head * 64 + 2 * pair + 1])


@pytest.mark.slow
def test_the_default_model_equals_what_transformers_itself_loads() -> None:
    from sonar_engine.models.registry import resolve_model
    from transformers import AutoModelForCausalLM

    path = resolve_model("smollm2-135m").path
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    ours = load(path)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
