"""`sonar train fit`: it learns, a killed run ends like one that was not, several ranks like one, and what cannot be
trained is named."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BuildEngine
from head_watch import drafting
from safetensors.torch import load_file
from sonar_engine.drafters.mtp_checkpoint import read_head_config
from sonar_engine.errors import ConfigError, StorageError, TrainingError
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.weights import load_embedding
from sonar_engine.training import fit as fit_module
from sonar_engine.training import head_start, head_student
from sonar_engine.training.fit_log import FitLog
from sonar_engine.training.packing import build_batch, epoch_rows, pack_rows
from sonar_engine.training.recursion import run_recursion
from sonar_engine.training.schedule import FitSchedule
from sonar_engine.training.shards import CapturedTexts
from sonar_engine.training.validation import split_texts
from sonar_engine.training.vocabulary import choose_vocabulary
from sonar_engine.types import SamplingParams
from tiny_heads import make_head
from tiny_models import make_tiny
from training_runs import (
    Tensors,
    assert_equal,
    check_a_kill,
    check_two_ranks,
    files_end_at,
    fit,
    fit_config,
    killed_at,
    log_of,
    quiet,
    state_of,
)


def head_of(folder: Path) -> Tensors:
    return load_file(folder / "head" / "model.safetensors")


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tiny_states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("trained") / "fit"
    fit(fit_config(tiny_folder, tiny_states, out=folder))
    return folder


def test_the_loss_falls_and_the_head_serves(
    tiny_folder: Path, tiny_states: Path, tmp_path: Path, build_tiny: BuildEngine
) -> None:
    out = tmp_path / "fit"
    head = fit(fit_config(tiny_folder, tiny_states, out=out, epochs=40, learning_rate=3e-3, save_every=50))
    steps = [line for line in log_of(out) if "loss" in line]
    assert steps[-1]["loss"] < 0.3 * steps[0]["loss"]
    assert steps[-1]["agreement"][0] > 0.8
    config = json.loads((head / "config.json").read_text())
    assert config["trained_for"]["name"] == tiny_folder.name
    assert config["training"]["steps"] == len(steps)
    assert config["dtype"] == "bfloat16"
    note = (head / "README.md").read_text()
    assert "licence" in note.lower()
    texts = CapturedTexts((tiny_states / "states",))
    for source, number in texts.texts_by_source.items():
        assert f"{number} {'of its own' if source == 'self' else f'from `{source}`'}" in note
    assert sum(texts.texts_by_source.values()) == len(texts) > texts.texts_by_source["self"] > 0
    index = split_texts(texts, 0.2).training[0]
    prompt = texts.tokens(index)[: texts.prompt_lens[index]].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine = build_tiny(speculative=drafting(head))
    assert engine.generate([prompt], params)[0].token_ids == build_tiny().generate([prompt], params)[0].token_ids
    assert engine.stats().num_draft_tokens > 0


@pytest.mark.parametrize(
    ("target", "name", "call"),
    [
        (FitLog, "write", 3),  # before the first state
        (FitLog, "write", 9),  # some steps beyond it
        (fit_module, "save_state", 1),
        (head_student, "export_head", 2),  # the head is newer than the state
    ],
)
def test_a_killed_run_ends_like_one_that_was_not(
    tiny_folder: Path, tiny_states: Path, trained: Path, tmp_path: Path, *, target: Any, name: str, call: int
) -> None:
    check_a_kill(fit_config(tiny_folder, tiny_states, out=tmp_path / "fit"), trained, target, name, call)


def test_a_finished_run_that_is_started_again_changes_nothing(
    tiny_folder: Path, tiny_states: Path, trained: Path
) -> None:
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    fit(fit_config(tiny_folder, tiny_states, out=trained))
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def test_other_settings_over_a_begun_run_are_refused(tiny_folder: Path, tiny_states: Path, trained: Path) -> None:
    for change in ({"learning_rate": 1e-4}, {"seed": 2}, {"num_steps": 2}, {"without_norms": ("input",)}):
        with pytest.raises(TrainingError, match="a run with other settings"):
            fit(fit_config(tiny_folder, tiny_states, out=trained, **change))


def test_a_run_can_begin_with_a_trained_head(
    tiny_folder: Path, tiny_states: Path, trained: Path, tmp_path: Path
) -> None:
    warm = fit_config(tiny_folder, tiny_states, out=tmp_path / "warm", init_from=trained / "head", warmup_steps=0)
    fit(warm)
    assert log_of(warm.out)[0]["loss"] < 0.8 * log_of(trained)[0]["loss"]
    assert torch.equal(head_of(warm.out)["d2t"], head_of(trained)["d2t"])


def test_bfloat16_arithmetic_follows_float32(
    tiny_folder: Path, tiny_states: Path, trained: Path, tmp_path: Path
) -> None:
    half = fit_config(tiny_folder, tiny_states, out=tmp_path / "half", compute="bfloat16")
    fit(half)
    assert state_of(half.out)["weight/head.eh_proj.weight"].dtype == torch.float32
    ours, theirs = log_of(half.out), log_of(trained)
    assert ours[0]["loss"] != theirs[0]["loss"]
    for mine, other in zip(ours, theirs, strict=True):
        if "loss" in mine:
            assert mine["loss"] == pytest.approx(other["loss"], rel=0.1)


@pytest.mark.parametrize("norm", ["embedding", "feature", "input", "post_attention", "final"])
def test_every_norm_can_be_left_out(tiny_folder: Path, tiny_states: Path, tmp_path: Path, norm: str) -> None:
    config = fit_config(
        tiny_folder, tiny_states, out=tmp_path / "fit", without_norms=(norm,), epochs=15, learning_rate=3e-3
    )
    head = fit(config)
    norms = read_head_config(head).config.norms
    assert [name for name, has in vars(norms).items() if not has] == [norm]
    losses = [line["loss"] for line in log_of(config.out) if "loss" in line]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_a_new_head_foresees_the_next_state(tiny_folder: Path, tiny_states: Path) -> None:
    """By regression its first features are near the states that they stand for, nearer than the states before them."""
    texts = CapturedTexts((tiny_states / "states",))
    target = ModelConfig.load(tiny_folder)
    batch = build_batch(texts, [[0, 1, 2, 3]], 512)
    embedding = load_embedding(tiny_folder, target, torch.float32, "cpu")
    likeness = {}
    for init in ("regression", "copy", "random"):
        config = fit_config(tiny_folder, tiny_states, init=init, draft_vocab_size=None)
        head, token_map = head_start.start_head(config, target, tiny_folder, texts, range(len(texts)))
        assert token_map is None
        with torch.no_grad():
            _, features = run_recursion(head, embedding, batch, 3, torch.float32)
        next_states = batch.hidden[0, batch.slots[0] + 1]
        likeness[init] = float(torch.cosine_similarity(features[0, 0], next_states, dim=-1).mean())
    own = torch.cosine_similarity(batch.hidden[0, batch.slots[0]], next_states, dim=-1).mean()
    assert likeness["regression"] > max(float(own), likeness["copy"], likeness["random"]) + 0.2


def test_feature_loss_and_raw_features_can_be_asked_for(tiny_folder: Path, tiny_states: Path, tmp_path: Path) -> None:
    plain = fit_config(tiny_folder, tiny_states, out=tmp_path / "plain", max_steps=3)
    featured = fit_config(tiny_folder, tiny_states, out=tmp_path / "featured", max_steps=3, feature_loss=0.5)
    raw = fit_config(tiny_folder, tiny_states, out=tmp_path / "raw", max_steps=3, next_feature="raw")
    for config in (plain, featured, raw):
        fit(config)
    assert log_of(featured.out)[0]["loss"] > log_of(plain.out)[0]["loss"]
    assert read_head_config(raw.out / "head").config.next_feature == "raw"
    assert log_of(raw.out)[0]["loss"] != log_of(plain.out)[0]["loss"]


def test_whole_vocabularies_and_more_layers_can_be_asked_for(
    tiny_folder: Path, tiny_states: Path, tmp_path: Path
) -> None:
    for size in (None, 10_000):
        config = fit_config(
            tiny_folder, tiny_states, out=tmp_path / str(size), draft_vocab_size=size, num_layers=2, max_steps=2
        )
        found = read_head_config(fit(config)).config
        assert found.draft_vocab_size is None
        assert found.block.num_layers == 2


# Several ranks.


def test_two_ranks_train_what_one_trains(tiny_folder: Path, tiny_states: Path, tmp_path: Path) -> None:
    check_two_ranks(fit_config(tiny_folder, tiny_states, out=tmp_path / "two", batch_rows=3, max_steps=10), tmp_path)


# Data.


def test_the_vocabulary_holds_the_most_frequent_ids_lower_ones_first() -> None:
    counts = torch.tensor([0, 5, 2, 2, 9, 2])
    chosen = choose_vocabulary(counts, 4)
    assert chosen.token_map.tolist() == [1, 2, 3, 4]
    assert chosen.coverage == 18 / 20


def test_coverage_is_said_and_counts_answers_alone(tiny_folder: Path, tiny_states: Path, tmp_path: Path) -> None:
    said: list[str] = []
    config = fit_config(tiny_folder, tiny_states, out=tmp_path / "fit", draft_vocab_size=20, max_steps=1)
    fit_module.fit_drafter(config, quiet, said.append)
    texts = CapturedTexts((tiny_states / "states",))
    counts: Counter[int] = Counter()
    for index in split_texts(texts, 0.2).training:
        counts.update(texts.tokens(index)[texts.prompt_lens[index] :].tolist())
    covered = sum(count for _, count in counts.most_common(20)) / sum(counts.values())
    assert said[1] == f"draft vocabulary: 20 ids, {covered:.2%} of the answers' tokens"


def test_rows_hold_every_text_once_and_are_not_overfull() -> None:
    lengths = [7, 30, 3, 12, 12, 100, 5, 5, 28]
    rows = pack_rows(lengths, range(len(lengths)), 32)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(min(lengths[index], 32) for index in row) <= 32 for row in rows)
    assert len(rows) <= 5
    assert epoch_rows(lengths, range(9), 32, 0, 0) == epoch_rows(lengths, range(9), 32, 0, 0)
    assert epoch_rows(lengths, range(9), 32, 0, 0) != epoch_rows(lengths, range(9), 32, 0, 1)


def test_the_rate_rises_and_then_falls_to_its_last_share(tiny_folder: Path, tiny_states: Path) -> None:
    config = fit_config(tiny_folder, tiny_states, warmup_steps=4, learning_rate=2.0, final_rate=0.1)
    schedule = FitSchedule(config, [60] * 20, range(20))
    rates = [schedule.rate(step) for step in range(1, schedule.num_steps + 1)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)
    planned = list(schedule.steps(0))
    assert [each.step for each in planned] == list(range(1, schedule.num_steps + 1))
    assert list(schedule.steps(7)) == planned[7:]


def test_a_text_stays_on_its_side_of_the_split(tiny_states: Path) -> None:
    texts = CapturedTexts((tiny_states / "states",))
    twice = CapturedTexts((tiny_states / "states", tiny_states / "states"))
    once, both = split_texts(texts, 0.3), split_texts(twice, 0.3)
    assert len(once.training) + len(once.validation) == len(texts)
    assert both.validation[: len(once.validation)] == once.validation
    assert len(both.validation) == 2 * len(once.validation) > 0
    assert split_texts(texts, 0.0).validation == []


# Errors.


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_last_state(
    tiny_folder: Path, tiny_states: Path, tmp_path: Path
) -> None:
    config = fit_config(tiny_folder, tiny_states, out=tmp_path / "fit", learning_rate=1e30, warmup_steps=0, clip=1e30)
    with pytest.raises(TrainingError, match=r"the loss of step \d+ is (nan|inf)"):
        fit(config)
    assert not (config.out / "head").exists()
    assert not (config.out / "state.safetensors").exists()


def test_a_full_disk_leaves_the_last_state(tiny_folder: Path, tiny_states: Path, trained: Path, tmp_path: Path) -> None:
    config = fit_config(tiny_folder, tiny_states, out=tmp_path / "fit")
    with killed_at(FitLog, "write", 8):
        fit(config)
    state = state_of(config.out)
    with files_end_at(20_000), pytest.raises(StorageError, match=r"model.safetensors cannot be written"):
        fit(config)
    assert_equal(state_of(config.out), state)
    assert not list(config.out.rglob("*.part"))
    fit(config)
    assert log_of(config.out) == log_of(trained)


def other_model(folder: Path) -> Path:
    return make_tiny("smollm", folder / "other", seed=9, tokenizer=True)


def test_states_of_another_target_are_refused(tiny_states: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"belongs to another target .*: its weights differ"):
        fit(fit_config(other_model(tmp_path), tiny_states, out=tmp_path / "fit"))
    assert not (tmp_path / "fit").exists()


def of_another_target(head: Path) -> None:
    path = head / "config.json"
    raw = json.loads(path.read_text())
    raw["trained_for"]["sha256"] = "0" * 64
    path.write_text(json.dumps(raw))


def of_another_shape(head: Path) -> None:
    other = make_tiny("llama2", head.parent / "other_shape")
    shutil.rmtree(head)
    make_head(other, head)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [(of_another_target, "belongs to another target"), (of_another_shape, "is of another model: its hidden size")],
)
def test_a_head_of_another_model_is_refused(  # noqa: PLR0917
    tiny_folder: Path, tiny_states: Path, trained: Path, tmp_path: Path, change: Callable[[Path], None], complaint: str
) -> None:
    head = tmp_path / "head"
    shutil.copytree(trained / "head", head)
    change(head)
    with pytest.raises(TrainingError, match=complaint):
        fit(fit_config(tiny_folder, tiny_states, out=tmp_path / "fit", init_from=head))
    assert not (tmp_path / "fit").exists()


def test_a_damaged_state_is_named(tiny_folder: Path, tiny_states: Path, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "fit"
    shutil.copytree(trained, out)
    (out / "state.safetensors").write_bytes(b"torn")
    with pytest.raises(TrainingError, match=r"state.safetensors is damaged"):
        fit(fit_config(tiny_folder, tiny_states, out=out))


def test_tensorboard_files_are_written_where_the_package_is_there(
    tiny_folder: Path, tiny_states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path / "on" / "tensorboard")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    fit(fit_config(tiny_folder, tiny_states, out=tmp_path / "on", tensorboard=True, max_steps=2))
    names = {name for name, _, _ in written}
    assert {"loss", "agreement/1", "agreement/3", "validation/loss", "closed"} <= names
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="tensorboard: the package is not installed"):
        fit(fit_config(tiny_folder, tiny_states, out=tmp_path / "off", tensorboard=True, max_steps=2))
