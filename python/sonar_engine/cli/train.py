"""`sonar train`: a head or a draft model for a model, from data to evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sonar_engine.cli.options import given_options, stage_options
from sonar_engine.cli.terminal import progress_bars
from sonar_engine.config_loader import load_stage
from sonar_engine.training.config import CaptureConfig, DataConfig, EvalConfig, FitConfig


def train_app() -> typer.Typer:
    app = typer.Typer(
        help="Train an MTP head or a draft model for a model: data, capture, fit, eval, or all of them.",
        no_args_is_help=True,
    )
    app.command()(data)
    app.command()(capture)
    app.command()(fit)
    app.command("eval")(evaluate)
    app.command()(run)
    return app


def _say(line: str) -> None:
    print(line, flush=True)


@stage_options(DataConfig)
def data(**options: Any) -> None:
    """Texts: the model's answers to prompts of files and to prompts that it writes itself. Run again to go on."""
    config = load_stage(DataConfig, given_options(options))
    from sonar_engine.training.data import make_texts

    with progress_bars(lines_without_terminal=True) as progress:
        manifest = make_texts(config, progress)
    print(json.dumps(manifest["counts"]))


@stage_options(CaptureConfig)
def capture(**options: Any) -> None:
    """The model's hidden states over the texts, by the engine that serves it. Run again to go on."""
    config = load_stage(CaptureConfig, given_options(options))
    from sonar_engine.training.capture import capture_texts

    with progress_bars(lines_without_terminal=True) as progress:
        index = capture_texts(config, progress, _say)
    print(f"{index.num_texts} texts, {index.num_tokens:,} tokens in {len(index.shards)} files")


@stage_options(FitConfig)
def fit(**options: Any) -> None:
    """A head or a draft model from captured states; under torchrun on several devices. Run again to go on."""
    config = load_stage(FitConfig, given_options(options))
    from sonar_engine.training.fit import fit_drafter

    with progress_bars(lines_without_terminal=True) as progress:
        folder = fit_drafter(config, progress, _say)
    print(folder)


@stage_options(EvalConfig)
def evaluate(**options: Any) -> None:
    """What a head or draft is worth: acceptance by task and position, loss, and speed, by the engine that serves it."""
    config = load_stage(EvalConfig, given_options(options))
    from sonar_engine.training.evaluate import evaluate_drafter

    with progress_bars(lines_without_terminal=True) as progress:
        evaluate_drafter(config, progress, _say)
    print(config.out)


def run(
    file: Annotated[Path, typer.Argument(help="YAML: out, model, and options of data, capture, fit, eval")],
) -> None:
    """All stages from one YAML file. Run again to go on."""
    from sonar_engine.training.pipeline import Pipeline

    pipeline = Pipeline.read(file)
    with progress_bars(lines_without_terminal=True) as progress:
        folder = pipeline.run(progress, _say)
    print(folder)
