"""The commands under one name, and how their errors end: one line and an exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from sonar_engine.cli.bench import bench_app
from sonar_engine.cli.chat import chat
from sonar_engine.cli.generate import generate
from sonar_engine.cli.models import models_app
from sonar_engine.cli.serve import serve
from sonar_engine.cli.terminal import INTERRUPTED, exit_with
from sonar_engine.cli.train import train_app
from sonar_engine.cli.verify import verify
from sonar_engine.errors import SonarError


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="sonar",
        help="Serve and run language models with lossless speculative decoding.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for command in (serve, generate, chat, verify):
        app.command()(command)
    app.add_typer(bench_app(), name="bench")
    app.add_typer(models_app(), name="models")
    app.add_typer(train_app(), name="train")
    return app


def _print_version(asked: bool) -> None:
    if asked:
        from sonar_engine import __version__

        print(f"sonar {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 an error in one line, 2 wrong usage, 130 interrupted."""
    try:
        build_app()(prog_name="sonar")
    except SonarError as error:
        exit_with(error, 1)
    except BrokenPipeError:  # the reader of our output has gone, as in `sonar generate ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
