"""bench/head_ablation.py: five heads trained alike, a table of what they came to, and a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sonar_engine.drafters.mtp_checkpoint import read_head_config
from sonar_engine.training.fit_log import FitLog
from training_runs import killed_at, log_of

FOLDERS = ["all", "without-input", "without-final", "without-final-input", "without-embedding-feature"]


@pytest.fixture(scope="module")
def ablation() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
        import head_ablation

        return head_ablation


class Script:
    """The script, as its command line runs it."""

    def __init__(
        self, ablation: ModuleType, common: list[str], patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._ablation, self._common, self._patch, self._capsys = ablation, common, patch, capsys

    def run(self, out: Path, *options: str) -> str:
        """What it prints."""
        self._patch.setattr(sys, "argv", ["head_ablation.py", *self._common, "--out", str(out), *options])
        self._capsys.readouterr()
        self._ablation.main()
        return self._capsys.readouterr().out

    def fails(self, out: Path, *options: str) -> str:
        """Its complaint, of one line."""
        with pytest.raises(SystemExit) as end:
            self.run(out, *options)
        err = self._capsys.readouterr().err.strip().splitlines()
        assert end.value.code == 1
        return err[-1]


@pytest.fixture
def script(
    ablation: ModuleType,
    tiny_folder: Path,
    tiny_states: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Script:
    common = {
        "captures": tiny_states / "states",
        "model": tiny_folder,
        "draft-vocab-size": 120,
        "row-tokens": 128,
        "batch-rows": 2,
        "validation-share": 0.2,
        "num-threads": 1,
        "device": "cpu",
    }
    return Script(ablation, [f"--{name}={value}" for name, value in common.items()], monkeypatch, capsys)


def test_the_table_says_what_the_runs_came_to(script: Script, tmp_path: Path) -> None:
    out, picture = tmp_path / "runs", tmp_path / "losses.png"
    printed = script.run(out, "--max-steps", "4", "--warmup-steps", "0", "--plot", str(picture))
    assert (out / "table.md").read_text() == printed
    head, rule, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()]
    assert head[0] == "head"
    assert head[3:] == ["position 1", "position 2", "position 3", "acceptance length"]
    assert set(rule) == {"---"}
    names = ["all norms", "without input norm", "without final norm", "without both (EAGLE)"]
    assert [row[0] for row in rows] == [*names, "without embedding and hidden norms"]
    for folder, row in zip(FOLDERS, rows, strict=True):
        log = log_of(out / folder)
        validation, losses = log[-1]["validation"], [line["loss"] for line in log if "loss" in line]
        figures = [sum(losses) / 4, validation["loss"], *validation["conditional"], validation["acceptance_length"]]
        assert [float(cell) for cell in row[1:]] == pytest.approx(figures, abs=6e-4)
        norms = read_head_config(out / folder / "head").config.norms
        left_out = sorted(name for name, has in vars(norms).items() if not has)
        assert left_out == folder.split("-")[1:]
    assert len({row[2] for row in rows}) == 5
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_killed_comparison_goes_on_and_finished_variants_are_left_alone(
    script: Script, ablation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--max-steps", "4", "--save-every", "2")
    whole = script.run(tmp_path / "whole", *options)
    with killed_at(FitLog, "write", 11):  # 6 lines a variant
        script.run(tmp_path / "runs", *options)
    assert len(log_of(tmp_path / "runs" / "without-input")) == 5
    begun: list[str] = []
    fit = ablation.fit_drafter

    def watched(config: Any, *arguments: Any) -> Path:
        begun.append(config.out.name)
        return fit(config, *arguments)

    monkeypatch.setattr(ablation, "fit_drafter", watched)
    assert script.run(tmp_path / "runs", *options) == whole
    assert begun == FOLDERS[1:]
    assert script.run(tmp_path / "runs", *options) == whole
    assert begun == FOLDERS[1:]
    assert "a run with other settings" in script.fails(tmp_path / "runs", "--max-steps", "5")


def test_a_variant_that_diverges_is_told_and_the_others_go_on(script: Script, tmp_path: Path) -> None:
    options = ("--max-steps", "6", "--warmup-steps", "0", "--learning-rate", "1e30", "--clip", "1e30")
    printed = script.run(tmp_path / "runs", *options)
    rows = printed.splitlines()[2:]
    assert len(rows) == 5
    for folder, row in zip(FOLDERS, rows, strict=True):
        assert f"diverged at step {len(log_of(tmp_path / 'runs' / folder)) + 1} |" in row
    assert script.run(tmp_path / "runs", *options) == printed


def test_what_cannot_be_compared_is_one_line(script: Script, tmp_path: Path) -> None:
    assert "--max-steps: " in script.fails(tmp_path / "runs", "--max-steps", "0")
    assert "no text was kept out" in script.fails(tmp_path / "runs", "--max-steps", "1", "--validation-share", "0")
    assert not (tmp_path / "runs" / "table.md").exists()
