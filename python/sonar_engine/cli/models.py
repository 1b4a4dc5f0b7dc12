"""`sonar models`: what is known by name, what is here, and fetching it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sonar_engine.cli.terminal import progress_bars

MEBIBYTE = 1 << 20


def models_app() -> typer.Typer:
    app = typer.Typer(help="List the known models, or fetch one.", invoke_without_command=True)
    app.callback()(_default)
    app.command("list")(list_models)
    app.command("pull")(pull_model)
    return app


def _default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_models()


def list_models() -> None:
    """List the models known by name, and where their files are."""
    from sonar_engine.models import registry

    table = Table("model", "cached", "MiB", "path", box=None, pad_edge=False)
    for entry in registry.list_models():
        table.add_row(entry.name, "yes" if entry.cached else "no", f"{entry.size / MEBIBYTE:.0f}", str(entry.path))
    Console(soft_wrap=True).print(table)
    print("Any Hugging Face folder or .gguf file of a Llama, Mistral, Qwen2 or Qwen3 model works by its path.")


def pull_model(name: Annotated[str, typer.Argument(help="A name that `sonar models` lists")]) -> None:
    """Fetch a model into the cache (SONAR_CACHE, or ~/.cache/sonar)."""
    from sonar_engine.models import registry

    with progress_bars(lines_without_terminal=True) as progress:
        path = registry.pull(name, progress)
    print(path)
