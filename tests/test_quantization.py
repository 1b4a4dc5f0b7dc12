"""Weights of four and eight bits: the products they stand for, and an engine that drafts on them without loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BuildEngine
from model_runs import load_runner, needs_native, run_alone
from sonar_engine.errors import ConfigError
from sonar_engine.layers.native import QUANT_GROUP, NativeLinear, NativeOps, Quantization
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.registry import resolve_model
from sonar_engine.models.weights import load_weights
from sonar_engine.tokenizer import load_tokenizer
from sonar_engine.types import SamplingParams
from test_engine import NGRAM, SETTINGS, ids, make_prompts
from tiny_heads import make_head
from tiny_models import make_tiny

pytestmark = needs_native
QUANTIZATIONS: list[Quantization] = ["int8", "int4"]


TEXT = """The water cycle describes how water moves on, above and below the surface of the Earth. The sun warms the
oceans, and water evaporates into the air. Rising air carries it up, where it cools and condenses into clouds. When the
drops grow heavy enough they fall as rain or snow, and rivers carry the water back to the sea."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stands_for(linear: NativeLinear) -> torch.Tensor:
    """The weights as the product sees them, fp64 [out, in]."""
    rows = [linear._weight.dequantized(row) for row in range(linear.out_features)]
    return torch.tensor(rows, dtype=torch.float64)


def in_eight_bits(x: torch.Tensor) -> torch.Tensor:
    """Rows quantised by groups, fp64."""
    groups = x.view(x.shape[0], -1, QUANT_GROUP)
    most = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, 127 / most, 0.0)
    return ((groups * inverse).round().double() * (most / 127).double()).view(x.shape)


@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_product_is_that_of_the_quantised_matrices(quantization: Quantization, rows: int) -> None:
    x, weight, bias = normal(rows, 160), normal(75, 160, seed=1), normal(75, seed=2)
    x[0, :32] = 0
    linear = NativeOps(2, quantization=quantization).linear(weight, bias)
    expected = in_eight_bits(x) @ stands_for(linear).T + bias.double()
    assert torch.allclose(linear(x).double(), expected, rtol=1e-5, atol=1e-4)
    worst = (stands_for(linear) - weight).abs().amax()
    assert float(worst) < {"int8": 0.02, "int4": 0.25}[quantization]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_row_is_the_same_alone_and_among_others_on_one_thread_and_three(quantization: Quantization) -> None:
    x, weight = normal(40, 96).bfloat16(), normal(200, 96, seed=1).bfloat16()
    one, three = (NativeOps(count, quantization=quantization).linear(weight, None) for count in (1, 3))
    together = one(x)
    assert torch.equal(three(x), together)
    assert all(torch.equal(one(x[row : row + 1])[0], together[row]) for row in range(len(x)))


def test_what_was_quantised_before_is_found_again_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(0, 16, (64, 3, QUANT_GROUP), generator=generator).float()
    steps[..., 0], steps[..., 1] = 0, 15
    scale = (torch.rand(64, 3, 1, generator=generator) * 0.1 + 0.01).half().float()
    least = (torch.randn(64, 3, 1, generator=generator)).half().float()
    weight = (steps * scale + least).view(64, -1)
    linear = NativeOps(1, quantization="int4").linear(weight, None)
    assert torch.allclose(stands_for(linear).float(), weight, rtol=0, atol=1e-6)


def test_the_default_model_has_in_four_bits_what_its_file_says() -> None:
    path = resolve_model("smollm2-135m").path
    weights = load_weights(path, ModelConfig.load(path), torch.float32, torch.device("cpu"))
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        weight = weights[f"model.layers.7.{name}.weight"]
        found = stands_for(NativeOps(1, quantization="int4").linear(weight, None))
        assert torch.allclose(found.float(), weight, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_default_model_chooses_as_it_does_unquantised(quantization: str) -> None:
    model = resolve_model("smollm2-135m")
    path, prompt = model.path, load_tokenizer(model).encode(TEXT)
    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_tokens": 512, "max_num_seqs": 2}
    plain = run_alone(load_runner(path, "native", "bfloat16", **options), prompt)
    found = run_alone(load_runner(path, "native", "bfloat16", quantization=quantization, **options), prompt)
    divergence = (plain.softmax(-1) * (plain.log_softmax(-1) - found.log_softmax(-1))).sum(-1)
    assert float(divergence.mean()) < 0.02
    assert float((plain.argmax(-1) == found.argmax(-1)).float().mean()) > 0.9


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hidden size 64: two groups. The matrix behind the gate has 112 inputs, no whole groups, and stays as it is."""
    return make_tiny("llama3", tmp_path_factory.mktemp("tiny"), tokenizer=True)


@pytest.mark.parametrize("drafter", ["ngram", "mtp", "draft_model"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_drafts_change_no_token_on_quantised_weights(
    quantization: str, drafter: str, tiny: Path, tmp_path: Path, build_tiny: BuildEngine
) -> None:
    speculative: dict[str, Any] = NGRAM
    if drafter == "mtp":
        head = make_head(tiny, tmp_path / "head")
        speculative = {"method": "mtp", "model": str(head), "num_speculative_tokens": 3}
    elif drafter == "draft_model":
        speculative = {"method": "draft_model", "model": str(tiny), "num_speculative_tokens": 3}
    prompts = make_prompts(10)
    params = [SamplingParams(max_tokens=30, ignore_eos=True, **list(SETTINGS.values())[i % 4]) for i in range(10)]
    options = {"model": str(tiny), "quantization": quantization}
    plain = build_tiny(**options).generate(prompts, params)
    engine = build_tiny(**options, speculative=speculative)
    assert ids(engine.generate(prompts, params)) == ids(plain)
    stats = engine.stats()
    assert (stats.num_accepted_tokens if drafter != "mtp" else stats.num_draft_tokens) > 0  # a random head is no good
    alone = build_tiny(**options).generate(prompts[3:4], params[3])
    assert ids(alone) == ids(plain[3:4])


def test_quantised_weights_take_less_memory() -> None:
    weight = normal(512, 576)
    sizes = [NativeOps(1, quantization=q).linear(weight, None).num_bytes for q in ("none", "int8", "int4")]
    assert sizes[0] == 4 * weight.numel()
    assert sizes[1] == pytest.approx(weight.numel() * 8.5 / 8)
    assert sizes[2] == pytest.approx(weight.numel() * 5 / 8)


def test_only_the_native_kernels_quantise(tiny: Path, build_tiny: BuildEngine) -> None:
    with pytest.raises(ConfigError, match="native"):
        build_tiny(model=str(tiny), quantization="int4", linear_backend="torch", attention_backend="torch")
