"""`log.jsonl` of a run, and TensorBoard files where they are asked for."""

from __future__ import annotations

from typing import Any

from sonar_engine.errors import ConfigError
from sonar_engine.training.config import FitConfig
from sonar_engine.training.journal import Journal, read_journal

LOG = "log.jsonl"


class FitLog:
    """Goes on behind the line of the last saved step: what a killed run logged beyond it will be logged again."""

    def __init__(self, config: FitConfig, is_first_rank: bool, done: int) -> None:
        self._journal: Journal | None = None
        self._board: Any = None
        if not is_first_rank:
            return
        path = config.out / LOG
        known = sum(1 for line in read_journal(path) if line["step"] <= done)
        self._journal = Journal(path)
        self._journal.keep(known)
        if config.tensorboard:
            self._board = _summary_writer(config)

    def __enter__(self) -> FitLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._journal is not None:
            self._journal.close()
        if self._board is not None:
            self._board.close()

    def write(self, line: dict[str, Any]) -> None:
        """`step`, and figures, lists of figures by draft step, or a group of such."""
        if self._journal is not None:
            self._journal.append(line)
        if self._board is not None:
            for name, value in _scalars(line):
                self._board.add_scalar(name, value, line["step"])


def _scalars(line: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in line.items():
        if isinstance(value, dict):
            found += _scalars(value, f"{name}/")
        elif isinstance(value, list):
            found += [(f"{prefix}{name}/{index + 1}", float(each)) for index, each in enumerate(value)]
        elif name != "step":
            found.append((prefix + name, float(value)))
    return found


def _summary_writer(config: FitConfig) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "tensorboard: the package is not installed (pip install 'sonar-engine[train]'); "
            "log.jsonl is written without it"
        ) from None
    return SummaryWriter(str(config.out / "tensorboard"))
