"""`sonar train eval`: simulated acceptance is the measured one, and the report says what the engine did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sonar_engine.errors import TrainingError
from sonar_engine.training.config import EvalConfig
from sonar_engine.training.evaluate import evaluate_drafter
from tiny_heads import make_copied_head, make_head
from tiny_models import make_tiny
from training_runs import fit, fit_config, quiet

WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "ate", "the", "other", "hat", "in", "the", "sun"]
SEES = 24  # tokens: more than the template puts behind a prompt, so that answers differ, and less than a prompt has
Report = dict[str, Any]


def prompt_files(folder: Path, count: int) -> tuple[Path, ...]:
    """Two tasks of `count` prompts each, longer than the window of `make_copied_head`."""
    folder.mkdir(exist_ok=True)
    paths = []
    for task in ("cats", "dogs"):
        path = folder / f"{task}.jsonl"
        rows = [
            {"prompt": " ".join(WORDS[(index * 5 + shift) % 16] for shift in range(12)) + f" {task} {index}"}
            for index in range(count)
        ]
        path.write_text("\n".join(json.dumps(row) for row in rows))
        paths.append(path)
    return tuple(paths)


def eval_config(model: Path, head: Path, folder: Path, **fields: Any) -> EvalConfig:
    own: dict[str, Any] = {
        "model": str(model),
        "head": head,
        "out": folder / "report",
        "prompts": prompt_files(folder, 20),
        "dtype": "float32",
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_answer_tokens": 60,
        "timed_prompts": 0,
    }
    return EvalConfig(**{**own, **fields})


@pytest.fixture(scope="module")
def half_right(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a head whose drafts are right about half of the time, with ids of its own."""
    ids = torch.arange(0, 320)[torch.randperm(320, generator=torch.Generator().manual_seed(3))[:310]]
    folder = tmp_path_factory.mktemp("half")
    return make_copied_head(folder, noise=0.12, token_map=ids.sort().values.int(), sliding_window=SEES)


@pytest.fixture(scope="module")
def report(half_right: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    folder = tmp_path_factory.mktemp("eval")
    target, head = half_right
    config = eval_config(target, head, folder, temperature=(0.0, 1.0), timed_prompts=2)
    return evaluate_drafter(config, quiet, quiet), config.out


def test_simulated_and_measured_acceptance_agree(report: tuple[Report, Path]) -> None:
    greedy = report[0]["temperatures"][0]
    measured = greedy["tasks"]["all"]
    assert measured["tokens"] > 1500
    assert 1.3 < measured["acceptance_length"] < 3.7
    assert greedy["simulated"] == pytest.approx(measured["acceptance_length"], rel=0.03)
    assert greedy["simulated_conditional"] == pytest.approx(measured["conditional"], abs=0.05)


def test_the_overlap_foretells_the_acceptance_of_sampled_drafts(report: tuple[Report, Path]) -> None:
    sampled = report[0]["temperatures"][1]
    assert sampled["simulated"] is None
    first = sampled["tasks"]["all"]["reached"][0]
    assert first == pytest.approx(sampled["alpha"][0], abs=0.08)


def test_the_report_adds_up_over_tasks_and_is_written_with_plots(report: tuple[Report, Path]) -> None:
    found, out = report
    for entry in found["temperatures"]:
        tasks = entry["tasks"]
        assert set(tasks) == {"cats", "dogs", "all"}
        assert tasks["cats"]["prompts"] == tasks["dogs"]["prompts"] == 20
        assert tasks["cats"]["tokens"] + tasks["dogs"]["tokens"] == tasks["all"]["tokens"]
        lengths = [tasks[name]["acceptance_length"] for name in ("cats", "all", "dogs")]
        assert min(lengths) <= tasks["all"]["acceptance_length"] <= max(lengths)
        assert entry["loss"] > 0
    assert found["speed"]["same_tokens"] == found["speed"]["num_prompts"] == 2
    assert min(found["speed"]["plain"], found["speed"]["drafting"]) > 0
    assert json.loads((out / "report.json").read_text()) == found
    names = {path.name for path in out.iterdir()}
    assert names == {"report.json", "acceptance-0.png", "acceptance-1.png"}
    assert (out / "acceptance-0.png").read_bytes().startswith(b"\x89PNG")


def test_look_ups_beside_a_head_are_measured_and_not_simulated(half_right: tuple[Path, Path], tmp_path: Path) -> None:
    target, head = half_right
    alone, beside = (
        evaluate_drafter(eval_config(target, head, tmp_path / str(lookup), prompt_lookup=lookup), quiet, quiet)
        for lookup in (False, True)
    )
    figures = [each["temperatures"][0] for each in (alone, beside)]
    assert figures[0]["tasks"]["all"]["tokens"] == figures[1]["tasks"]["all"]["tokens"]  # the same texts
    assert figures[0]["tasks"]["all"]["reached"] != figures[1]["tasks"]["all"]["reached"]
    assert figures[0]["simulated"] is not None
    assert (beside["prompt_lookup"], figures[1]["simulated"]) == (True, None)


def test_the_table_names_every_task(half_right: tuple[Path, Path], tmp_path: Path) -> None:
    said: list[str] = []
    found = evaluate_drafter(eval_config(*half_right, tmp_path, per_task=3), quiet, said.append)
    assert found["prompts"] == 6
    assert [line.split()[0] for line in said] == ["temperature", "task", "cats", "dogs", "all", "loss"]
    assert f"simulated length {found['temperatures'][0]['simulated']:.3f}" in said[-1]
    assert "speed" not in found


def test_plots_of_a_run_come_with_its_head(tiny_folder: Path, tiny_states: Path, tmp_path: Path) -> None:
    head = fit(fit_config(tiny_folder, tiny_states, out=tmp_path / "fit", max_steps=6, save_every=3))
    config = eval_config(tiny_folder, head, tmp_path, per_task=2, num_speculative_tokens=2)
    found = evaluate_drafter(config, quiet, quiet)
    assert len(found["temperatures"][0]["alpha"]) == 2
    assert {"loss.png", "training.png", "acceptance-0.png"} <= {path.name for path in config.out.iterdir()}


def test_a_head_of_another_model_is_refused(
    tiny_folder: Path, half_right: tuple[Path, Path], tiny_states: Path, tmp_path: Path
) -> None:
    other = make_tiny("llama2", tmp_path / "other")
    with pytest.raises(TrainingError, match="is of another model: its hidden size"):
        evaluate_drafter(eval_config(tiny_folder, make_head(other, tmp_path / "small"), tmp_path), quiet, quiet)
    head = tmp_path / "mixed"
    shutil.copytree(fit(fit_config(tiny_folder, tiny_states, out=tmp_path / "fit", max_steps=1)), head)
    twin = make_tiny("smollm", tmp_path / "twin", seed=9, tokenizer=True)
    with pytest.raises(TrainingError, match="belongs to another target"):
        evaluate_drafter(eval_config(twin, head, tmp_path), quiet, quiet)
    assert not (tmp_path / "report").exists()
