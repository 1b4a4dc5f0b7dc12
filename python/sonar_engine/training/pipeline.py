"""`sonar train run`: data, capture, fit and eval from one YAML file, each stage going on where it stopped.

    out: my-head                 # data, states, fit and eval are folders in it
    model: smollm2-135m
    data: {prompts: [prompts.jsonl], tokens: 1000000}
    fit: {epochs: 4}
    eval: {prompts: [questions.jsonl]}

`data`, `capture`, `fit` and `eval` take the options of their commands, underscores for hyphens. A stage that is not
named runs with its defaults, but for `eval`, which needs prompts and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from sonar_engine.config_loader import load_stage
from sonar_engine.engine import Progress
from sonar_engine.errors import ConfigError, reason
from sonar_engine.training.config import CaptureConfig, DataConfig, EvalConfig, FitConfig

_STAGES: dict[str, type[BaseModel]] = {
    "data": DataConfig,
    "capture": CaptureConfig,
    "fit": FitConfig,
    "eval": EvalConfig,
}
_SHARED = ("out", "model", "dtype", "num_threads")


@dataclass(frozen=True)
class Pipeline:
    """The settings of every stage."""

    data: DataConfig
    capture: CaptureConfig
    fit: FitConfig
    evaluation: EvalConfig | None

    @classmethod
    def read(cls, path: Path) -> Pipeline:
        """Raises ConfigError that names the file, the stage and the option."""
        raw = _mapping(path)
        unknown = sorted(set(raw) - {*_STAGES, *_SHARED})
        if unknown:
            raise ConfigError(f"{path}: {unknown[0]}: no such key; known: {', '.join((*_SHARED, *_STAGES))}")
        if not isinstance(raw.get("out"), str):
            raise ConfigError(f"{path}: out is missing: the folder for everything")
        for stage in _STAGES:
            if not isinstance(raw.get(stage) or {}, dict):
                raise ConfigError(f"{path}: {stage} must be a mapping of options to values, such as 'seed: 1'")
        out = Path(raw["out"])
        places: dict[str, dict[str, Any]] = {
            "data": {"out": out / "data", "states": out / "states"},
            "capture": {"data": out / "data", "out": out / "states"},
            "fit": {"captures": [out / "states"], "out": out / "fit"},
            "eval": {"out": out / "eval"},
        }
        built: dict[str, Any] = {}
        for stage, config in _STAGES.items():
            own = raw.get(stage) or {}
            shared = {name: raw[name] for name in _SHARED[1:] if name in raw and name in config.model_fields}
            if stage == "eval":
                places[stage]["head"] = built["fit"].exported
            if stage != "eval" or own:
                built[stage] = load_stage(config, {**shared, **places[stage], **own}, path)
        return cls(built["data"], built["capture"], built["fit"], built.get("eval"))

    def run(self, progress: Progress, say: Callable[[str], None]) -> Path:
        """All stages; the folder that serves. Raises a SonarError."""
        from sonar_engine.training.capture import capture_texts
        from sonar_engine.training.data import make_texts
        from sonar_engine.training.evaluate import evaluate_drafter
        from sonar_engine.training.fit import fit_drafter

        counts = make_texts(self.data, progress)["counts"]
        say(f"data: {counts['texts']:,} texts, {counts['answer_tokens']:,} answer tokens in {self.data.out}")
        capture_texts(self.capture, progress, say)
        exported = fit_drafter(self.fit, progress, say)
        if self.evaluation is not None:
            evaluate_drafter(self.evaluation, progress, say)
        return exported


def _mapping(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a readable YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {reason(error)}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping, such as 'out: my-head'")
    return raw
