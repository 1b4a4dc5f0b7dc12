"""`sonar train run` that is killed in each of its stages, again and again, ends with the files of one that was not."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from kill_points import KillPoint, run_sonar
from sonar_engine.training.fit_log import LOG
from sonar_engine.training.training_state import STATE, read_facts
from training_runs import PROMPTS, log_of, state_of

TORN_LINE = "sonar_engine.training.journal:Journal.append"
SHARD = "sonar_engine.training.shards:replacing"
WHOLE_SHARD = "sonar_engine.training.capture:write_shard"  # and no entry in the index
LOGGED = "sonar_engine.training.fit_log:FitLog.write"
TORN_STATE = "sonar_engine.training.training_state:replacing"
TORN_HEAD = "sonar_engine.drafters.mtp_checkpoint:replacing"
MEASURED = "sonar_engine.training.measure:walked_of"
REPORTED = "sonar_engine.training.evaluate:write_json"
TORN_PICTURE = "sonar_engine.training.plots:replacing"


def begin(folder: Path, model: Path, **data: Any) -> list[str]:
    """The command, for a working directory that holds what it needs; paths are relative, so that runs are alike."""
    folder.mkdir()
    (folder / "prompts.txt").write_text(PROMPTS)
    lengths = {"tokens": 400, "max_prompt_tokens": 60, "max_answer_tokens": 30}
    content = {
        "out": "out",
        "model": str(model),
        "dtype": "float32",
        "num_threads": 1,
        "data": {"prompts": ["prompts.txt"], **lengths, "shard_tokens": 200, **data},
        "capture": {"shard_tokens": 200},
        "fit": {
            "draft_vocab_size": 100,
            "row_tokens": 128,
            "max_steps": 4,
            "save_every": 2,
            "validation_share": 0.2,
            "device": "cpu",
        },
        "eval": {"prompts": ["prompts.txt"], "max_answer_tokens": 12, "timed_prompts": 1},
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(content))
    return ["train", "run", "train.yaml"]


def results(folder: Path) -> dict[str, Any]:
    """Every file of a run, without times. Metadata of safetensors have no order, so that a state is read."""
    out = folder / "out"
    found: dict[str, Any] = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    found[f"fit/{LOG}"] = log_of(out / "fit")
    tensors = {name: tensor.numpy().tobytes() for name, tensor in state_of(out / "fit").items()}
    found[f"fit/{STATE}"] = (tensors, read_facts(out / "fit" / STATE))
    report = json.loads(found["eval/report.json"])
    assert min(report["speed"].pop("plain"), report["speed"].pop("drafting")) > 0
    found["eval/report.json"] = report
    return found


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run leaves that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run_sonar(folder, *begin(folder, tiny_folder)) == 0
    return results(folder)


@pytest.mark.parametrize(
    ("data", "kills"),
    [
        (
            {},  # states are kept while the target answers
            [KillPoint(TORN_LINE, 5), KillPoint(SHARD, 2), KillPoint(WHOLE_SHARD), KillPoint(TORN_STATE, 2)],
        ),
        (
            {"states": None},
            [
                KillPoint(TORN_LINE, 9),
                KillPoint(SHARD, 2),
                KillPoint(WHOLE_SHARD),
                KillPoint(LOGGED, 2),
                KillPoint(TORN_STATE),
                KillPoint(TORN_HEAD, 2),
                KillPoint(LOGGED, 3),
                KillPoint(MEASURED, 3),
                KillPoint(REPORTED),
                KillPoint(TORN_PICTURE, 2),
            ],
        ),
    ],
)
def test_kill_9_in_every_stage_changes_nothing_in_the_end(
    tiny_folder: Path, whole: dict[str, Any], tmp_path: Path, data: dict[str, Any], kills: list[KillPoint]
) -> None:
    folder = tmp_path / "run"
    command = begin(folder, tiny_folder, **data)
    for kill in kills:
        assert run_sonar(folder, *command, kill=kill) == -signal.SIGKILL, kill
    assert run_sonar(folder, *command) == 0
    found = results(folder)
    assert found.keys() == whole.keys()
    for name, content in whole.items():
        assert found[name] == content, name
