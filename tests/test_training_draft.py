"""`sonar train fit --kind draft`: what is trained is what serves, it learns, and a killed run ends like one that was
not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BuildEngine
from pydantic import ValidationError
from safetensors.torch import load_file
from sonar_engine.config import EngineConfig
from sonar_engine.drafters.capture import capturing
from sonar_engine.engine import build_engine
from sonar_engine.errors import ConfigError, ModelLoadError, TrainingError
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.registry import resolve_model
from sonar_engine.models.weights import load_weights
from sonar_engine.tokenizer import load_tokenizer
from sonar_engine.training import draft_student
from sonar_engine.training import fit as fit_module
from sonar_engine.training.capture import StateCollector, capture_states
from sonar_engine.training.config import FitConfig
from sonar_engine.training.draft_start import chosen_layers, read_layers
from sonar_engine.training.draft_trainer import DraftLayers, run_packed
from sonar_engine.training.evaluate import evaluate_drafter
from sonar_engine.training.fit_log import FitLog
from sonar_engine.training.identity import TargetIdentity
from sonar_engine.training.packing import PackedBatch, build_batch
from sonar_engine.training.shards import CapturedTexts
from sonar_engine.training.texts import Text
from sonar_engine.types import SamplingParams
from test_training_eval import eval_config
from test_training_run import command, settings, write_yaml
from tiny_models import TINY_KINDS, make_tiny, transformers_model
from training_runs import (
    assert_equal,
    check_a_kill,
    check_two_ranks,
    fit,
    fit_config,
    log_of,
    make_states,
    quiet,
    state_of,
)


def draft_config(model: Path, folder: Path, **fields: Any) -> FitConfig:
    """The tiny model's first and last layer unless other `layers` are given."""
    whole = {"layers": (0, 2)} if not {"num_layers", "init_from"} & fields.keys() else {}
    return fit_config(model, folder, kind="draft", draft_vocab_size=8192, **{**whole, **fields})


def drafting(draft: Path, k: int = 3) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": k}


@pytest.fixture(scope="module")
def half_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose weights are bfloat16 numbers, so that an export rounds nothing of them."""
    folder = tmp_path_factory.mktemp("half")
    return make_tiny("smollm", folder, tokenizer=True, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def half_states(half_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half_states")
    make_states(half_folder, folder)
    return folder


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tiny_states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("trained") / "fit"
    fit(draft_config(tiny_folder, tiny_states, out=folder))
    return folder


# The trainer and the engine.


def whole_draft(folder: Path, max_positions: int = 512) -> tuple[DraftLayers, torch.Tensor, torch.Tensor]:
    """The trained part of a model in fp32, its embedding and its output matrix."""
    config = ModelConfig.load(folder)
    weights = load_weights(folder, config, torch.float32)
    embedding = weights["model.embed_tokens.weight"]
    output = weights.get("lm_head.weight", embedding)
    return read_layers(folder, config, tuple(range(config.num_layers)), max_positions), embedding, output


def texts_of(batch: PackedBatch, texts: CapturedTexts, rows: list[list[int]]) -> dict[int, tuple[int, slice]]:
    """Row and positions of each text in a batch."""
    found = {}
    for row, indices in enumerate(rows):
        at = 0
        for index in indices:
            found[index] = row, slice(at, at + texts.length(index))
            at += texts.length(index)
    assert sum(len(indices) for indices in rows) == len(found)
    return found


def logits_of(folder: Path, batch: PackedBatch) -> torch.Tensor:
    """The trainer's, [B, L, V]."""
    layers, embedding, output = whole_draft(folder)
    with torch.no_grad():
        return run_packed(layers, embedding, batch, torch.float32) @ output.T


def test_the_trainers_logits_are_those_of_the_exported_folder_in_the_engine(tiny_states: Path, trained: Path) -> None:
    """Texts packed several a row in the trainer; in the engine side by side, in pages of 4 tokens."""
    texts, draft = CapturedTexts((tiny_states / "states",)), trained / "draft"
    rows = [[0, 1, 2], [3], [4, 5]]
    batch = build_batch(texts, rows, 512)
    ours = logits_of(draft, batch)
    whole = [Text(i, "", 0.0, texts.tokens(i).numpy(), texts.prompt_lens[i]) for i in range(6)]
    limits: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 6, "kv_cache_tokens": 2048, "page_size": 4}
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, "enable_prefix_caching": False}
    collector = StateCollector()
    engine = build_engine(EngineConfig(model=str(draft), **limits, **options), quiet, capturing(collector.add))
    try:
        states = list(capture_states(engine, collector, iter(whole)))
        for index, (row, where) in texts_of(batch, texts, rows).items():
            theirs = engine._runner.model.logits(states[index][:-1])  # the last token is not run over
            torch.testing.assert_close(ours[row, where][:-1], theirs, rtol=1e-4, atol=1e-4)
    finally:
        engine.close()


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_every_familys_draft_is_one_that_transformers_loads_with_the_same_logits(kind: str, tmp_path: Path) -> None:
    target = make_tiny(kind, tmp_path / "target", tokenizer=True, dtype=torch.bfloat16)
    make_states(target, tmp_path, tokens=200)
    draft = fit(draft_config(target, tmp_path, max_steps=2, learning_rate=1e-2))
    texts = CapturedTexts((tmp_path / "states",))
    rows = [[0, 1], [2]]
    batch = build_batch(texts, rows, 512)
    ours, reference = logits_of(draft, batch), transformers_model(draft)
    for index, (row, where) in texts_of(batch, texts, rows).items():
        theirs = reference(texts.tokens(index).long()[None]).logits[0]
        torch.testing.assert_close(ours[row, where], theirs, rtol=1e-4, atol=1e-3)


def test_a_packed_text_gives_what_it_gives_alone(tiny_states: Path, trained: Path) -> None:
    texts = CapturedTexts((tiny_states / "states",))
    rows = [[3, 0, 2], [1], []]
    packed = build_batch(texts, rows, 512)
    together = logits_of(trained / "draft", packed)
    for index, (row, where) in texts_of(packed, texts, rows).items():
        alone = logits_of(trained / "draft", build_batch(texts, [[index]], texts.length(index)))
        torch.testing.assert_close(together[row, where], alone[0], rtol=1e-4, atol=1e-4)


def test_with_all_layers_it_is_the_target_and_every_draft_is_accepted(
    build_tiny: BuildEngine, half_folder: Path, half_states: Path, tmp_path: Path
) -> None:
    config = draft_config(half_folder, half_states, out=tmp_path / "fit", layers=(0, 1, 2), learning_rate=1e-12)
    draft = fit(config)
    lines = log_of(config.out)
    assert 0 <= lines[0]["loss"] < 1e-6
    assert lines[0]["agreement"] == [1.0] * 3
    assert lines[0]["overlap"] == pytest.approx([1.0] * 3, abs=1e-5)
    ours, theirs = load_file(draft / "model.safetensors"), load_file(half_folder / "model.safetensors")
    assert_equal(ours, {name: theirs[name] for name in ours})
    engine = build_tiny(model=str(half_folder), speculative=drafting(draft))
    texts = CapturedTexts((half_states / "states",))
    prompts = [texts.tokens(index)[: texts.prompt_lens[index]].tolist() for index in range(4)]
    engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 80


# Learning.


def test_the_loss_falls_and_embedding_and_output_stay(tiny_folder: Path, tiny_states: Path, tmp_path: Path) -> None:
    config = draft_config(tiny_folder, tiny_states, out=tmp_path / "fit", epochs=30, learning_rate=3e-3, save_every=50)
    draft = fit(config)
    steps = [line for line in log_of(config.out) if "loss" in line]
    assert steps[-1]["loss"] < 0.3 * steps[0]["loss"]
    assert steps[-1]["agreement"][0] > steps[0]["agreement"][0] + 0.2
    weights, target = load_file(draft / "model.safetensors"), load_file(tiny_folder / "model.safetensors")
    assert torch.equal(weights["model.embed_tokens.weight"], target["model.embed_tokens.weight"].bfloat16())
    assert "lm_head.weight" not in weights
    for name, tensor in weights.items():
        assert tensor.dtype == torch.bfloat16
        own = name.replace("layers.1.", "layers.2.")
        assert torch.equal(tensor, target[own].bfloat16()) == (name == "model.embed_tokens.weight"), name
    assert "licence" in (draft / "README.md").read_text().lower()
    described = json.loads((draft / "config.json").read_text())
    assert described["architectures"] == ["LlamaForCausalLM"]
    assert described["training"]["layers"] == [0, 2]
    assert described["training"]["steps"] == len(steps)


def test_the_exported_tokenizer_is_the_targets(tiny_folder: Path, trained: Path) -> None:
    identities = [
        TargetIdentity.of(resolved, load_tokenizer(resolved))
        for resolved in (resolve_model(str(tiny_folder)), resolve_model(str(trained / "draft")))
    ]
    assert identities[0].tokenizer_sha256 == identities[1].tokenizer_sha256
    assert identities[0].template_sha256 == identities[1].template_sha256


@pytest.mark.parametrize(
    ("target", "name", "call"),
    [
        (FitLog, "write", 3),  # before the first state
        (FitLog, "write", 9),  # some steps beyond it
        (fit_module, "save_state", 1),
        (draft_student, "export_draft", 2),  # the draft is newer than the state
    ],
)
def test_a_killed_run_ends_like_one_that_was_not(
    tiny_folder: Path, tiny_states: Path, trained: Path, tmp_path: Path, *, target: Any, name: str, call: int
) -> None:
    check_a_kill(draft_config(tiny_folder, tiny_states, out=tmp_path / "fit"), trained, target, name, call)


def test_a_run_can_begin_with_a_trained_draft(
    tiny_folder: Path, tiny_states: Path, trained: Path, tmp_path: Path
) -> None:
    warm = draft_config(tiny_folder, tiny_states, out=tmp_path / "warm", init_from=trained / "draft", max_steps=1)
    fit(warm)
    assert log_of(warm.out)[0]["loss"] < 0.8 * log_of(trained)[0]["loss"]


def test_bfloat16_arithmetic_keeps_float32_weights(tiny_folder: Path, tiny_states: Path, tmp_path: Path) -> None:
    config = draft_config(tiny_folder, tiny_states, out=tmp_path / "fit", compute="bfloat16", max_steps=2)
    fit(config)
    assert {tensor.dtype for tensor in state_of(config.out).values()} == {torch.float32}


def test_two_ranks_train_what_one_trains(tiny_folder: Path, tiny_states: Path, tmp_path: Path) -> None:
    check_two_ranks(draft_config(tiny_folder, tiny_states, out=tmp_path / "two", batch_rows=3, max_steps=10), tmp_path)


# Which layers.


@pytest.mark.parametrize(
    ("num_layers", "of", "wanted"),
    [(2, 30, (0, 29)), (3, 30, (0, 15, 29)), (4, 7, (0, 2, 4, 6)), (3, 3, (0, 1, 2)), (5, 6, (0, 1, 3, 4, 5))],
)
def test_layers_are_evenly_spaced_with_the_first_and_the_last(
    tiny_folder: Path, num_layers: int, of: int, wanted: tuple[int, ...]
) -> None:
    config = ModelConfig.load(tiny_folder)
    target = ModelConfig(**{**vars(config), "num_layers": of, "layer_windows": ()})
    assert chosen_layers((), num_layers, target) == wanted
    assert chosen_layers((1,), 1, target) == (1,)


def test_the_chosen_layers_are_the_targets(tiny_folder: Path) -> None:
    target = load_file(tiny_folder / "model.safetensors")
    draft = read_layers(tiny_folder, ModelConfig.load(tiny_folder), (1, 2), 16)
    for name, parameter in draft.named_parameters():
        own = name.replace("layers.1.", "layers.2.").replace("layers.0.", "layers.1.")
        assert torch.equal(parameter, target[f"model.{own}"])


def test_windows_go_with_their_layers(tmp_path: Path) -> None:
    target = make_tiny("qwen2_window", tmp_path / "target", tokenizer=True)
    make_states(target, tmp_path, tokens=200)
    draft = ModelConfig.load(fit(draft_config(target, tmp_path, max_steps=1)))
    whole = ModelConfig.load(target)
    assert (draft.num_layers, draft.layer_windows) == (2, (whole.layer_windows[0], whole.layer_windows[2]))
    assert draft.layer_windows[0] is None


# Errors.


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"layers": (0, 3)}, "layers: 3 is no layer of the target, whose layers are 0 to 2"),
        ({"num_layers": 4}, "num_layers: the target has 3 layers"),
    ],
)
def test_layers_that_the_target_does_not_have_are_named(
    tiny_folder: Path, tiny_states: Path, tmp_path: Path, fields: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        fit(draft_config(tiny_folder, tiny_states, out=tmp_path / "fit", **fields))
    assert not (tmp_path / "fit").exists()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"kind": "draft"}, "kind draft needs layers, such as 0,1,29, or num_layers"),
        ({"kind": "draft", "layers": "0,1", "num_steps": 2}, "num_steps is for kind head, and kind is draft"),
        ({"kind": "draft", "layers": "0,1", "draft_vocab_size": 100}, "draft_vocab_size is for kind head"),
        ({"kind": "draft", "layers": "0,1", "without_norms": ["input"]}, "without_norms is for kind head"),
        ({"layers": "0,1"}, "layers is for kind draft, and kind is head"),
        ({"kind": "draft", "layers": "1,0"}, "ascending order"),
        ({"kind": "draft", "layers": "0,0"}, "ascending order"),
        ({"kind": "draft", "layers": "0,x"}, "valid integer"),
        ({"kind": "draft", "layers": "-1,2"}, "greater than or equal to 0"),
        ({"kind": "draft", "layers": "0,1", "num_layers": 2}, "layers and num_layers both say"),
        ({"kind": "draft", "layers": "0,1", "init_from": "d"}, "layers and init_from both say"),
    ],
)
def test_options_that_do_not_go_together_are_named(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        FitConfig(captures=(Path("a"),), out=Path("b"), **fields)


def test_a_head_and_a_model_of_its_own_are_no_draft_to_go_on_from(
    tiny_folder: Path, tiny_states: Path, tmp_path: Path
) -> None:
    head = fit(fit_config(tiny_folder, tiny_states, out=tmp_path / "head", max_steps=1))
    with pytest.raises(ModelLoadError, match="SonarMtpHead"):
        fit(draft_config(tiny_folder, tiny_states, out=tmp_path / "fit", init_from=head))
    with pytest.raises(TrainingError, match="is a model of its own, and no draft"):
        fit(draft_config(tiny_folder, tiny_states, out=tmp_path / "fit", init_from=tiny_folder))
    assert not (tmp_path / "fit").exists()


# Commands.


def test_eval_measures_a_draft_as_the_trainer_foresees(
    tiny_folder: Path, tiny_states: Path, trained: Path, tmp_path: Path
) -> None:
    config = eval_config(tiny_folder, trained / "draft", tmp_path, per_task=10, timed_prompts=2)
    report = evaluate_drafter(config, quiet, quiet)
    greedy = report["temperatures"][0]
    measured = greedy["tasks"]["all"]
    assert 1.0 < measured["acceptance_length"] < 4.0
    assert greedy["simulated"] == pytest.approx(measured["acceptance_length"], rel=0.03)
    assert report["speed"]["same_tokens"] == 2
    assert {path.name for path in config.out.iterdir()} >= {"report.json", "acceptance-0.png", "loss.png"}


def test_eval_refuses_a_model_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="`sonar bench` measures any draft model"):
        evaluate_drafter(eval_config(tiny_folder, tiny_folder, tmp_path), quiet, quiet)


def test_one_file_makes_and_evaluates_a_draft(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = settings(tiny_folder, tmp_path)
    del content["fit"]["draft_vocab_size"]
    content["fit"] |= {"kind": "draft", "layers": [0, 2]}
    code, printed, err = command(monkeypatch, capsys, "run", str(write_yaml(tmp_path, content)))
    assert code == 0, err
    assert "draft model: 2 layers of 3 (0, 2), " in printed
    assert printed.splitlines()[-1] == str(tmp_path / "out" / "fit" / "draft")
    report = json.loads((tmp_path / "out" / "eval" / "report.json").read_text())
    assert report["head"] == str(tmp_path / "out" / "fit" / "draft")


def test_layers_are_given_on_the_command_line(
    tiny_folder: Path,
    tiny_states: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = ["fit", "--kind", "draft", "--captures", str(tiny_states / "states"), "--model", str(tiny_folder)]
    common += ["--out", str(tmp_path / "fit"), "--max-steps", "1", "--row-tokens", "128", "--device", "cpu"]
    code, _, err = command(monkeypatch, capsys, *common, "--layers", "0,9")
    assert (code, len(err.strip().splitlines())) == (1, 1)
    assert "layers: 9 is no layer of the target" in err
    code, _, err = command(monkeypatch, capsys, *common, "--layers", "0", "--num-steps", "2")
    assert (code, len(err.strip().splitlines())) == (1, 1)
    assert "num_steps is for kind head, and kind is draft" in err
    code, _, _ = command(monkeypatch, capsys, *common, "--layers", "0,2")
    assert code == 0
    assert ModelConfig.load(tmp_path / "fit" / "draft").num_layers == 2
