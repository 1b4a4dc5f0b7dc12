"""`sonar serve`: the OpenAI-compatible server."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from sonar_engine.cli.options import config_options, load_drafting_options
from sonar_engine.config import EngineConfig
from sonar_engine.server.config import ServerConfig


@config_options(EngineConfig, ServerConfig)
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Known name, folder, .gguf file or hub id", show_default=False)
    ] = None,
    **options: Any,
) -> None:
    """Serve MODEL over OpenAI's protocol.

    Options come from the command line, then SONAR_* variables (--max-num-seqs is SONAR_MAX_NUM_SEQS), then --config.
    """
    loaded = load_drafting_options(options, "adaptive", model=model)
    from sonar_engine.server.run import run_server

    sys.exit(run_server(loaded.engine, loaded.server))
