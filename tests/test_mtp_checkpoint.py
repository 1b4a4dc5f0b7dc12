"""MTP heads on disk: what is written is read back, both layouts give the same head, and what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BuildEngine
from safetensors.torch import load_file, save_file
from sonar_engine.drafters.mtp_checkpoint import LoadedHead, load_head, read_head_config, save_head
from sonar_engine.drafters.mtp_config import HeadNorms, MtpConfig
from sonar_engine.drafters.mtp_head import MtpHead
from sonar_engine.errors import ConfigError, ModelLoadError, SonarError
from sonar_engine.kv_cache import bytes_per_token
from sonar_engine.layers.torch_ops import TorchOps
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.types import SamplingParams
from test_engine import ids, make_prompts
from tiny_heads import WholeSequence, make_head, random_head, to_deepseek_layout
from tiny_models import TINY_KINDS, make_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
Tensors = dict[str, torch.Tensor]


def drafting(head: Path | None, **fields: Any) -> dict[str, Any]:
    model = {} if head is None else {"model": str(head)}
    return {"method": "mtp", "num_speculative_tokens": 3, **model, **fields}


def load(head: Path, target: Path) -> LoadedHead:
    target_config = ModelConfig.load(target)
    return load_head(read_head_config(head), target, target_config, max_positions=64, dtype=torch.float32)


def change_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


@pytest.fixture
def head_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A head of two layers that drafts 5 ids."""
    token_map = torch.tensor([9, 2, 300, 4, 5], dtype=torch.int32)
    return make_head(tiny_folder, tmp_path / "head", num_layers=2, token_map=token_map)


@pytest.fixture
def deepseek_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    head = make_head(tiny_folder, tmp_path / "plain_head", next_feature="raw")
    return to_deepseek_layout(tiny_folder, head, tmp_path / "both")


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_configuration_comes_back_as_it_was_written(tmp_path: Path, kind: str) -> None:
    target = ModelConfig.load(make_tiny(kind, tmp_path, num_hidden_layers=1))
    for options in (
        {},
        {"num_layers": 2, "fusion_bias": True, "next_feature": "raw", "draft_vocab_size": 50},
        {"norms": HeadNorms(feature=False, input=False)},
    ):
        config = MtpConfig.of_target(target, **options)  # type: ignore[arg-type]
        assert MtpConfig.from_dict(json.loads(json.dumps(config.to_dict())), "here") == config


def test_a_head_comes_back_as_it_was_saved_and_saving_leaves_no_other_file(tiny_folder: Path, tmp_path: Path) -> None:
    config = MtpConfig.of_target(ModelConfig.load(tiny_folder), fusion_bias=True, draft_vocab_size=3)
    head, token_map = random_head(config), torch.tensor([7, 0, 319], dtype=torch.int32)
    for _ in range(2):  # also over an older one
        save_head(head, tmp_path / "head", token_map)
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors.pop("d2t").tolist() == [7, -1, 317]
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == config.shapes()
    result = load(tmp_path / "head", tiny_folder)
    assert torch.equal(result.token_map, token_map)  # type: ignore[arg-type]
    for name, parameter in result.head.named_parameters():
        assert torch.equal(parameter, head.get_parameter(name))


def test_both_layouts_give_the_same_drafts(build_tiny: BuildEngine, tiny_folder: Path, tmp_path: Path) -> None:
    head = make_head(tiny_folder, tmp_path / "head", next_feature="raw")
    both = to_deepseek_layout(tiny_folder, head, tmp_path / "both")
    prompts = make_prompts(4)
    counts = []
    for options in (
        {"speculative": drafting(head)},
        {"speculative": drafting(both)},
        {"speculative": drafting(None), "model": str(both)},  # the target brings its head
    ):
        engine = build_tiny(**options)
        texts = ids(engine.generate(prompts, GREEDY))
        counts.append((texts, engine.stats().num_draft_tokens, engine.stats().num_accepted_tokens))
    assert counts[0] == counts[1] == counts[2]
    assert ids(build_tiny(model=str(both)).generate(prompts, GREEDY)) == counts[0][0]  # and needs none


def test_a_head_can_be_trained_and_packing_changes_nothing_but_that(tiny_folder: Path) -> None:
    config = MtpConfig.of_target(ModelConfig.load(tiny_folder), num_layers=2, fusion_bias=True)
    head, hidden_size = MtpHead(config, max_positions=32), config.block.hidden_size
    head.reset_parameters()
    generator = torch.Generator().manual_seed(0)
    embeddings, features = torch.randn(2, 9, hidden_size, generator=generator)
    positions = torch.arange(9, dtype=torch.int32)
    states = head(embeddings, features, positions, WholeSequence([], []))
    states.for_logits.square().sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
    head.pack(TorchOps())
    packed = head(embeddings, features, positions, WholeSequence([], []))
    torch.testing.assert_close(packed.for_logits, states.for_logits.detach())
    with pytest.raises(ConfigError, match="packed"):
        head.parameters_for_saving()


def test_the_heads_keys_and_values_are_counted_in_the_memory_plan(
    build_tiny: BuildEngine, tiny_folder: Path, head_folder: Path
) -> None:
    target = ModelConfig.load(tiny_folder)
    engine = build_tiny(speculative=drafting(head_folder))
    expected = bytes_per_token(target, torch.float32) * (target.num_layers + 2) // target.num_layers
    assert engine.kv_cache_bytes == 4096 * expected
    assert engine._drafter.kv_layers == 2


# What does not fit.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("enorm.weight"), r"1 missing: enorm\.weight"),
        (lambda t: t.update({"extra.weight": torch.zeros(2)}), r"1 unknown: extra\.weight"),
        (lambda t: t.update({"norm.weight": torch.zeros(5)}), r"1 misshapen: norm\.weight is \[5\], expected \[144\]"),
        (lambda t: t.pop("d2t"), "1 missing: d2t"),
        (lambda t: t.update({"d2t": torch.arange(7)}), r"d2t is \[7\], expected \[5\]"),
        (lambda t: t.update({"d2t": torch.zeros(5)}), "'d2t' has dtype F32; supported are I64"),
        (lambda t: t.update({"d2t": torch.tensor([0, -1, 0, 0, 0])}), "5 different ids from 0 to 319, and gives 4"),
        (lambda t: t.update({"d2t": torch.tensor([0, 0, 0, 0, 316])}), "gives 5 from 0 to 320"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    build_tiny: BuildEngine, head_folder: Path, change: Callable[[Tensors], Any], message: str
) -> None:
    change_tensors(head_folder, change)
    with pytest.raises(ModelLoadError, match=message):
        build_tiny(speculative=drafting(head_folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 72, "head_dim": 8}, "of another model: its hidden_size is 72, the target's 144"),
        ({"vocab_size": 321}, "of another model: its vocab_size is 321, the target's 320"),
        ({"max_position_embeddings": 128}, "has 128 positions, below max_model_len=256"),
        ({"norms": {"last": True}}, "norms has no 'last'; it has embedding, feature, input, post_attention, final"),
        ({"norms": {"input": 1}}, "norms must be an object of true and false"),
        ({"next_feature": "y"}, "next_feature must be 'normed' or 'raw', not 'y'"),
        ({"draft_vocab_size": 321}, "draft_vocab_size 321 is above vocab_size 320"),
        ({"architectures": ["OtherHead"], "model_type": "other"}, "OtherHead"),
        ({"block_type": "gpt2"}, "gpt2"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    build_tiny: BuildEngine, head_folder: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(head_folder, **changes)
    with pytest.raises(SonarError, match=message):
        build_tiny(speculative=drafting(head_folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.3.hnorm.weight"), r"1 missing: model\.layers\.3\.hnorm\.weight"),
        (lambda t: t["model.layers.3.embed_tokens.weight"].add_(1), "embed_tokens.weight differs from the target's"),
        (lambda t: t.update({"model.layers.3.mlp.gate.weight": torch.zeros(1)}), r"1 unknown: .*mlp\.gate"),
    ],
)
def test_a_head_inside_a_targets_checkpoint_must_fit_it(
    build_tiny: BuildEngine, deepseek_folder: Path, change: Callable[[Tensors], Any], message: str
) -> None:
    change_tensors(deepseek_folder, change)
    with pytest.raises(ModelLoadError, match=message):
        build_tiny(model=str(deepseek_folder), speculative=drafting(None))


def test_layers_behind_the_heads_are_unknown_tensors(build_tiny: BuildEngine, deepseek_folder: Path) -> None:
    change_tensors(deepseek_folder, lambda t: t.update({"model.layers.4.enorm.weight": torch.zeros(144)}))
    with pytest.raises(ModelLoadError, match=r"1 unknown: model\.layers\.4\.enorm\.weight"):
        build_tiny(model=str(deepseek_folder))


def test_a_target_without_a_head_is_refused_where_none_is_named(build_tiny: BuildEngine, head_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="needs a SonarMtpHead, or a model with num_nextn_predict_layers 1"):
        build_tiny(speculative=drafting(None))
    with pytest.raises(ConfigError, match="computes in the target's float32, not in bfloat16"):
        build_tiny(speculative=drafting(head_folder, dtype="bfloat16"))


def test_a_saved_token_map_has_as_many_ids_as_the_configuration_says(tiny_folder: Path, tmp_path: Path) -> None:
    head = random_head(MtpConfig.of_target(ModelConfig.load(tiny_folder), draft_vocab_size=4))
    with pytest.raises(ModelLoadError, match="draft_vocab_size is 4, and the token map has 2 ids"):
        save_head(head, tmp_path / "head", torch.tensor([1, 2]))
    assert not (tmp_path / "head").exists()
