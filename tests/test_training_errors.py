"""What goes wrong in a stage of training is one line, leaves nothing half-written, and costs no more than a second
start."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sonar_engine.engine import Progress
from sonar_engine.errors import DivergedError, StorageError, TrainingError
from sonar_engine.training.capture import capture_texts
from sonar_engine.training.config import FitConfig
from sonar_engine.training.data import make_texts
from sonar_engine.training.evaluate import evaluate_drafter
from sonar_engine.training.trainer import HeadTrainer
from test_training_eval import eval_config
from training_runs import (
    capture_config,
    data_config,
    files_end_at,
    fit,
    fit_config,
    log_of,
    quiet,
    with_another_tokenizer,
)

Files = dict[str, bytes]


def files_in(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def head(tiny_folder: Path, tiny_states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(fit_config(tiny_folder, tiny_states, out=tmp_path_factory.mktemp("head") / "fit", max_steps=2))


# A full disk.


@contextmanager
def files_end_from(stage: str, num_bytes: int) -> Iterator[Progress]:
    """A full disk from when a stage shows `stage`: an engine maps shared memory when it is built, that counts too."""
    with ExitStack() as stack:

        def progress(what: str, done: int, total: int) -> None:
            if what == stage:
                stack.enter_context(files_end_at(num_bytes))

        yield progress


def test_a_full_disk_leaves_whole_texts_to_go_on_from(tiny_folder: Path, tiny_states: Path, tmp_path: Path) -> None:
    config, whole = data_config(tiny_folder, tmp_path), files_in(tiny_states / "data")
    assert len(whole["manifest.json"]) < 2500 < len(whole["texts.jsonl"])
    complaint = r"texts.jsonl cannot be written: File too large"
    with files_end_from("Answering", 2500) as progress, pytest.raises(StorageError, match=complaint):
        make_texts(config, progress)
    left = files_in(config.out)
    assert left.keys() == whole.keys()
    assert 0 < len(left["texts.jsonl"]) < 2500
    assert left["texts.jsonl"].endswith(b"\n")
    assert whole["texts.jsonl"].startswith(left["texts.jsonl"])
    make_texts(config, quiet)
    assert files_in(config.out)["texts.jsonl"] == whole["texts.jsonl"]


def test_a_full_disk_leaves_whole_states_to_go_on_from(tiny_folder: Path, tiny_states: Path, tmp_path: Path) -> None:
    config = capture_config(tiny_folder, tiny_states, out=tmp_path / "states")
    with files_end_at(50_000), pytest.raises(StorageError, match=r"states-00000.safetensors cannot be written"):
        capture_texts(config, quiet, quiet)
    assert files_in(config.out).keys() == {"index.json"}
    capture_texts(config, quiet, quiet)
    assert files_in(config.out) == files_in(tiny_states / "states")


def test_a_full_disk_leaves_whole_lines_of_the_log(tiny_folder: Path, tiny_states: Path, tmp_path: Path) -> None:
    config = fit_config(tiny_folder, tiny_states, out=tmp_path / "fit", max_steps=4)
    with files_end_at(700), pytest.raises(StorageError, match=r"log.jsonl cannot be written: File too large"):
        fit(config)
    assert 0 < len(log_of(config.out)) < 4
    assert files_in(config.out).keys() == {"log.jsonl"}


@pytest.mark.parametrize(("num_bytes", "file"), [(400, "report.json"), (5000, "acceptance-0.png")])
def test_a_full_disk_leaves_no_torn_report(
    tiny_folder: Path, head: Path, tmp_path: Path, num_bytes: int, file: str
) -> None:
    config = eval_config(tiny_folder, head, tmp_path, per_task=1, max_answer_tokens=8)
    complaint = f"{file} cannot be written"
    with files_end_from("Capturing", num_bytes) as progress, pytest.raises(StorageError, match=complaint):
        evaluate_drafter(config, progress, quiet)
    assert files_in(config.out).keys() == ({"report.json"} if file != "report.json" else set())


# A loss that is no number.


def test_a_loss_that_stops_being_a_number_leaves_the_last_state_and_head(
    tiny_folder: Path, tiny_states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: FitConfig = fit_config(tiny_folder, tiny_states, out=tmp_path / "fit", max_steps=8)
    forward, steps, saved = HeadTrainer.forward, iter(range(1, 100)), {}

    def poisoned(trainer: HeadTrainer, *arguments: Any) -> Any:
        loss, outcome = forward(trainer, *arguments)
        if torch.is_grad_enabled() and next(steps) == 7:
            saved.update(files_in(config.out))
            loss = loss * torch.nan
        return loss, outcome

    monkeypatch.setattr(HeadTrainer, "forward", poisoned)
    with pytest.raises(DivergedError, match=r"the loss of step 7 is nan.*the last save is unharmed") as error:
        fit(config)
    assert len(str(error.value).splitlines()) == 1
    assert {"state.safetensors", "head/model.safetensors", "head/config.json"} < saved.keys()
    assert files_in(config.out) == saved
    assert [line["step"] for line in log_of(config.out)] == [1, 2, 3, 4, 5, 5, 6]
    monkeypatch.undo()
    fit(config)
    whole = fit(config.model_copy(update={"out": tmp_path / "whole"}))
    assert files_in(config.exported) == files_in(whole)


# A tokenizer that is not the one of before.


def begin_data(model: Path, states: Path, out: Path, head: Path) -> None:
    make_texts(data_config(model, out, out=states / "data"), quiet)


def begin_fit(model: Path, states: Path, out: Path, head: Path) -> None:
    fit(fit_config(model, states, out=out / "fit"))


def begin_eval(model: Path, states: Path, out: Path, head: Path) -> None:
    evaluate_drafter(eval_config(model, head, out), quiet, quiet)


@pytest.mark.parametrize("begin", [begin_data, begin_fit, begin_eval])
def test_a_wrong_tokenizer_is_refused_by_every_stage(
    tiny_folder: Path, tiny_states: Path, head: Path, tmp_path: Path, begin: Callable[..., None]
) -> None:
    other = with_another_tokenizer(tiny_folder, tmp_path / "other")
    (tmp_path / "out").mkdir()
    before = files_in(tiny_states)
    with pytest.raises(TrainingError, match=r"belongs to another target .*: its tokenizer differ") as error:
        begin(other, tiny_states, tmp_path / "out", head)
    assert len(str(error.value).splitlines()) == 1
    assert files_in(tiny_states) == before
    assert not {"fit", "report"} & {path.name for path in (tmp_path / "out").iterdir()}


def test_a_head_that_is_no_number_has_no_report(tiny_folder: Path, head: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(head, broken)
    weights = load_file(broken / "model.safetensors")
    name = next(name for name, tensor in weights.items() if tensor.is_floating_point())
    save_file({**weights, name: torch.full_like(weights[name], torch.nan)}, broken / "model.safetensors")
    with pytest.raises(DivergedError, match="a loss that is no number") as error:
        evaluate_drafter(eval_config(tiny_folder, broken, tmp_path), quiet, quiet)
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "report" / "report.json").exists()
