"""Small runs of the training stages over the tiny model."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sonar_engine.training.capture import capture_texts
from sonar_engine.training.config import CaptureConfig, DataConfig, FitConfig
from sonar_engine.training.data import make_texts
from sonar_engine.training.fit import fit_drafter
from sonar_engine.training.fit_log import LOG
from sonar_engine.training.shards import ShardIndex
from sonar_engine.training.training_state import STATE

Tensors = dict[str, torch.Tensor]

PROMPTS = "the cat sat on the mat\n\nthe dog ate the hat\n\nthe sun and the other cat\n\nThe dog  ate the hat\n"


def quiet(*unused: object) -> None:
    """Takes what a stage says or shows."""


def data_config(model: Path, folder: Path, **fields: Any) -> DataConfig:
    """Texts of at most 90 tokens, of prompts of a file and of the model's own."""
    prompts = folder / "prompts.txt"
    folder.mkdir(parents=True, exist_ok=True)
    prompts.write_text(PROMPTS)
    own: dict[str, Any] = {
        "model": str(model),
        "out": folder / "data",
        "prompts": (prompts,),
        "tokens": 600,
        "max_prompt_tokens": 60,
        "max_answer_tokens": 30,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
        "dtype": "float32",
    }
    return DataConfig(**{**own, **fields})


def capture_config(model: Path, folder: Path, **fields: Any) -> CaptureConfig:
    own: dict[str, Any] = {
        "model": str(model),
        "data": folder / "data",
        "out": folder / "states",
        "shard_tokens": 300,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
        "dtype": "float32",
    }
    return CaptureConfig(**{**own, **fields})


def fit_config(model: Path, folder: Path, **fields: Any) -> FitConfig:
    own: dict[str, Any] = {
        "model": str(model),
        "captures": (folder / "states",),
        "out": folder / "fit",
        "draft_vocab_size": 120,
        "row_tokens": 128,
        "batch_rows": 2,
        "epochs": 4,
        "warmup_steps": 2,
        "save_every": 5,
        "validation_share": 0.2,
        "num_threads": 1,
        "device": "cpu",
    }
    return FitConfig(**{**own, **fields})


def make_states(model: Path, folder: Path, **fields: Any) -> ShardIndex:
    """Texts in `folder`/data and their states in `folder`/states."""
    make_texts(data_config(model, folder, **fields), quiet)
    return capture_texts(capture_config(model, folder), quiet, quiet)


def fit(config: FitConfig) -> Path:
    return fit_drafter(config, quiet, quiet)


def log_of(folder: Path) -> list[dict[str, Any]]:
    """Without the times."""
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def state_of(folder: Path) -> Tensors:
    return load_file(folder / STATE)


def assert_equal(got: Tensors, wanted: Tensors) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


def assert_close(got: Tensors, wanted: Tensors, tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


class _Killed(BaseException):
    pass


@contextmanager
def killed_at(owner: Any, name: str, call: int) -> Iterator[None]:
    """The `call`-th call of a function ends what runs inside at the function's end, as a kill would."""
    original, calls = getattr(owner, name), count(1)

    def killing(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        if next(calls) == call:
            raise _Killed
        return result

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Killed):
        patch.setattr(owner, name, killing)
        yield


def check_a_kill(config: FitConfig, whole: Path, owner: Any, name: str, call: int) -> None:
    """A run that is killed there and started again ends like the finished one in `whole`."""
    with killed_at(owner, name, call):
        fit(config)
    assert len(log_of(config.out)) < len(log_of(whole))
    fit(config)
    assert log_of(config.out) == log_of(whole)
    assert_equal(state_of(config.out), state_of(whole))
    for path in (whole / config.kind).iterdir():
        assert (config.exported / path.name).read_bytes() == path.read_bytes(), path.name


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """Stands in for a full disk: the system writes a file up to `num_bytes` and then refuses."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def with_another_tokenizer(model: Path, folder: Path) -> Path:
    """A copy of `model` whose tokenizer lacks a merge."""
    shutil.copytree(model, folder)
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["merges"] = raw["model"]["merges"][:-1]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return folder


def check_two_ranks(config: FitConfig, tmp_path: Path) -> None:
    """Sharded by FSDP2 over gloo, against one rank."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import sys\n"
        "from sonar_engine.training.config import FitConfig\n"
        "from training_runs import fit\n"
        "fit(FitConfig.model_validate_json(sys.argv[1]))\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [*launch, config.model_dump_json()], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    single = config.model_copy(update={"out": tmp_path / "one"})
    fit(single)
    for mine, other in zip(log_of(config.out), log_of(single.out), strict=True):
        assert mine.keys() == other.keys()
        if "loss" in mine:
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
            assert mine["gradient"] == pytest.approx(other["gradient"], rel=1e-3)
            assert mine["agreement"] == pytest.approx(other["agreement"], abs=0.02)
        else:
            assert mine["validation"]["loss"] == pytest.approx(other["validation"]["loss"], rel=1e-4)
    assert_close(state_of(config.out), state_of(single.out), 1e-4)
