"""`sonar models`: what is known by name, what is here, and fetching it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

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

    for entry in registry.list_models():
        state = "cached" if entry.cached else "not cached"
        print(f"{entry.name}  {entry.description}, {entry.size_bytes / MEBIBYTE:.0f} MiB, {state}: {entry.path}")
    print("Any Hugging Face folder or .gguf file of a Llama, SmolLM, Mistral, Qwen2 or Qwen3 model works by its path.")


def pull_model(name: Annotated[str, typer.Argument(help="A name that `sonar models` lists")]) -> None:
    """Fetch a model into the cache (SONAR_CACHE, or ~/.cache/sonar)."""
    from sonar_engine.models import registry

    with progress_bars(lines_without_terminal=True) as progress:
        path = registry.pull(name, partial(progress, f"Fetching {name}"))
    print(path)
