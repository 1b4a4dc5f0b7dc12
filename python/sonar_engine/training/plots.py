"""Pictures of a run and of a report, as PNG files."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from sonar_engine.errors import ConfigError
from sonar_engine.files import replacing
from sonar_engine.training.fit_log import LOG
from sonar_engine.training.journal import read_journal


def plot_report(report: dict[str, Any], run: Path, out: Path) -> None:
    """acceptance-T.png for each temperature; loss.png and training.png too where `run` has a log."""
    for entry in report["temperatures"]:
        _bars(entry, out / f"acceptance-{entry['temperature']:g}.png")
    if (run / LOG).exists():
        plot_losses({"": run}, out / "loss.png")
        _acceptance(run, out / "training.png")


def plot_losses(runs: dict[str, Path], path: Path) -> None:
    """Loss against optimiser steps of one run or several, by name: every step thin, validations thick."""
    figure, axes = _figure()
    for name, run in runs.items():
        lines = list(read_journal(run / LOG))
        steps = [line for line in lines if "loss" in line]
        checks = [line for line in lines if "validation" in line]
        (drawn,) = axes.plot([x["step"] for x in steps], [x["loss"] for x in steps], linewidth=0.5, alpha=0.5)
        losses = [x["validation"]["loss"] for x in checks]
        label = f"{name} validation".strip()
        axes.plot([x["step"] for x in checks], losses, color=drawn.get_color(), marker=".", label=label)
    axes.set(xlabel="optimiser step", ylabel="loss, nats")
    axes.legend()
    _save(figure, path)


def _acceptance(run: Path, path: Path) -> None:
    """Acceptance length of walked validation texts, and conditional acceptance, against tokens trained on."""
    lines = list(read_journal(run / LOG))
    tokens = dict(enumerate(accumulate(line["tokens"] for line in lines if "tokens" in line), start=1))
    checks = [line for line in lines if "validation" in line]
    figure, axes = _figure()
    at = [tokens[line["step"]] for line in checks]
    axes.plot(at, [line["validation"]["acceptance_length"] for line in checks], marker=".", color="black")
    axes.set(xlabel="tokens trained on, repeated ones counted", ylabel="acceptance length (black)")
    shares = axes.twinx()
    depth = len(checks[0]["validation"]["conditional"]) if checks else 0
    for position in range(depth):
        values = [line["validation"]["conditional"][position] for line in checks]
        shares.plot(at, values, linestyle="--", label=f"position {position + 1}")
    shares.set(ylabel="conditional acceptance", ylim=(0, 1))
    if depth:
        shares.legend(loc="lower right")
    _save(figure, path)


def _bars(entry: dict[str, Any], path: Path) -> None:
    """Conditional acceptance by position, a group a task."""
    figure, axes = _figure()
    tasks = list(entry["tasks"])
    depth = len(entry["alpha"])
    for position in range(depth):
        at = [index + 0.8 * position / depth for index in range(len(tasks))]
        heights = [entry["tasks"][task]["conditional"][position] for task in tasks]
        axes.bar(at, heights, 0.8 / depth, align="edge", label=f"position {position + 1}")
    axes.set_xticks([index + 0.4 for index in range(len(tasks))], tasks, rotation=30, ha="right")
    axes.set(ylabel="conditional acceptance", ylim=(0, 1), title=f"temperature {entry['temperature']:g}")
    axes.legend()
    _save(figure, path)


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib (pip install 'sonar-engine[train]')") from None
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=120)
