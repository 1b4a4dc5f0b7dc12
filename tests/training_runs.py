"""Small runs of the training stages over the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sonar_engine.training.capture import capture_texts
from sonar_engine.training.config import CaptureConfig, DataConfig, FitConfig
from sonar_engine.training.data import make_texts
from sonar_engine.training.fit import fit_drafter
from sonar_engine.training.fit_log import LOG
from sonar_engine.training.shards import ShardIndex

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
