"""`sonar train` as a command: all stages from one YAML file, and errors of one line that name the option."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from sonar_engine.cli import main
from sonar_engine.errors import ConfigError
from sonar_engine.training.pipeline import Pipeline
from training_runs import PROMPTS, log_of


def write_yaml(folder: Path, content: Any) -> Path:
    path = folder / "train.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def settings(model: Path, folder: Path) -> dict[str, Any]:
    prompts = folder / "prompts.txt"
    prompts.write_text(PROMPTS)
    return {
        "out": str(folder / "out"),
        "model": str(model),
        "dtype": "float32",
        "num_threads": 1,
        "data": {"prompts": [str(prompts)], "tokens": 400, "max_prompt_tokens": 60, "max_answer_tokens": 30},
        "fit": {"draft_vocab_size": 100, "row_tokens": 128, "max_steps": 4, "save_every": 2, "device": "cpu"},
        "eval": {"prompts": [str(prompts)], "max_answer_tokens": 12, "timed_prompts": 0},
    }


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of `sonar train`."""
    monkeypatch.setattr(sys, "argv", ["sonar", "train", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_one_file_runs_every_stage_and_a_second_start_goes_on(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    path = write_yaml(tmp_path, settings(tiny_folder, tmp_path))
    code, printed, _ = command(monkeypatch, capsys, "run", str(path))
    assert code == 0
    assert printed.splitlines()[-1] == str(out / "fit" / "head")
    assert {path.name for path in out.iterdir()} == {"data", "states", "fit", "eval"}
    assert json.loads((out / "eval" / "report.json").read_text())["prompts"] == 4
    log = log_of(out / "fit")
    code, printed, _ = command(monkeypatch, capsys, "run", str(path))
    assert code == 0
    assert "0 texts, 0 tokens" in printed
    assert log_of(out / "fit") == log


def test_eval_is_left_out_where_it_has_no_prompts(tiny_folder: Path, tmp_path: Path) -> None:
    content = settings(tiny_folder, tmp_path)
    del content["eval"], content["fit"]
    pipeline = Pipeline.read(write_yaml(tmp_path, content))
    assert pipeline.evaluation is None
    assert pipeline.fit.draft_vocab_size == 8192
    assert pipeline.fit.captures == (pipeline.capture.out,) == (pipeline.data.states,)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("out: [", "not valid YAML"),
        ("- 1", "must be a mapping"),
        ("model: x", "out is missing"),
        ("out: x\nfits: {}", "fits: no such key; known: out, model"),
        ("out: x\nfit: 3", "fit must be a mapping"),
        ("out: x\nfit: {epoch: 3}", r"epoch \(.*train.yaml\): no such option; did you mean epochs"),
        ("out: x\nfit: {epochs: 0}", r"epochs \(.*\): 0 is wrong: input should be greater than or equal to 1"),
        ("out: x\neval: {per_task: 3}", r"prompts \(.*\) is missing: Prompt files"),
    ],
)
def test_a_file_that_cannot_be_followed_is_one_line(tmp_path: Path, content: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Pipeline.read(write_yaml(tmp_path, content))
    with pytest.raises(ConfigError, match="No such file"):
        Pipeline.read(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["data"], "error: --out is missing: Folder for the texts"),
        (["data", "--out", "x", "--temperature", "3"], "--temperature: "),
        (["data", "--out", "x", "--prompts", "none.jsonl"], "none.jsonl: No such file"),
        (["capture", "--out", "x"], "error: --data is missing"),
        (["fit", "--captures", "none", "--out", "x"], "index.json is missing; make it with `sonar train capture`"),
        (["fit", "--captures", "a", "--out", "x", "--without-norms", "all"], "--without-norms: "),
        (["eval", "--head", "none", "--out", "x", "--prompts", "none.txt"], "config.json is missing"),
    ],
)
def test_wrong_options_are_errors_of_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = command(monkeypatch, capsys, *arguments)
    assert code == 1
    assert complaint in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()
