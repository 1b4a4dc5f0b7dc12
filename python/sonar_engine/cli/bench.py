"""`sonar bench`: measurements that anybody can repeat."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sonar_engine.bench.report import Measurement, Opponent, Settings
from sonar_engine.cli.options import config_options, load_options
from sonar_engine.cli.session import open_session
from sonar_engine.config import MAX_NUM_SEQS, MAX_SPECULATIVE_TOKENS, EngineConfig
from sonar_engine.errors import ConfigError
from sonar_engine.files import replacing

Json = Annotated[bool, typer.Option("--json", help="One JSON object a line")]
Compare = Annotated[
    str | None,
    typer.Option(metavar="transformers", help="Run its generate() in turn with ours, same weights and dtype"),
]
Rss = Annotated[bool, typer.Option("--rss", help="Resident memory, and what of it is neither weights nor KV cache")]
OutputLen = Annotated[int, typer.Option(min=2, help="Tokens a completion")]
Repeat = Annotated[int, typer.Option(min=1, help="Runs after the warm-up; the median is printed")]


def bench_app() -> typer.Typer:
    app = typer.Typer(
        help="Measure the scheduler, one stream, many, or how host and device overlap.", no_args_is_help=True
    )
    app.command()(scheduler)
    app.command()(latency)
    app.command()(throughput)
    app.command()(overlap)
    return app


def scheduler(
    requests: Annotated[str, typer.Option(metavar="N,N,...", help="Running requests")] = "1,64,256,1000",
    drafts: Annotated[str, typer.Option(metavar="K,K,...", help="Draft tokens a request and step")] = "0,3",
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each")] = 200,
    as_json: Json = False,
) -> None:
    """Plan, pack and commit of one decode step: microseconds from Python, prefix cache on, 256-token prompts."""
    from sonar_engine.bench.scheduler import measure_scheduler

    sizes = _whole_numbers(requests, "--requests", 1, MAX_NUM_SEQS)
    depths = _whole_numbers(drafts, "--drafts", 0, MAX_SPECULATIVE_TOKENS)
    _print((measure_scheduler(n, k, steps) for n in sizes for k in depths), as_json)


@config_options(EngineConfig, default_method="none")
def latency(
    *,
    output_len: OutputLen = 128,
    repeat: Repeat = 3,
    compare: Compare = None,
    rss: Rss = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """One greedy stream: a prompt of 46 tokens, then --output-len tokens; the prompt's time is included."""
    settings = Settings(output_len, repeat, _opponent(compare), rss)
    with open_session(load_options(options).engine) as session:
        from sonar_engine.bench.generation import measure_latency

        _print(measure_latency(session.engine, settings), as_json)


@config_options(EngineConfig, default_method="none")
def throughput(
    *,
    streams: Annotated[str, typer.Option(metavar="N,N,...", help="Streams at once")] = "1,8,32",
    output_len: OutputLen = 128,
    repeat: Repeat = 1,
    compare: Compare = None,
    rss: Rss = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Greedy streams side by side, each a prompt of its own; the prompts' time is included."""
    settings = Settings(output_len, repeat, _opponent(compare), rss)
    counts = _whole_numbers(streams, "--streams", 1, MAX_NUM_SEQS)
    config = load_options(options).engine
    config = config.model_copy(update={"max_num_seqs": max(config.max_num_seqs, *counts)})
    with open_session(config) as session:
        from sonar_engine.bench.generation import measure_throughput

        _print(measure_throughput(session.engine, counts, settings), as_json)


def overlap(
    *,
    schedule: Annotated[Literal["draft_target", "mtp"], typer.Option(help="Order of a step's stages")] = "draft_target",
    requests: Annotated[int, typer.Option(min=1, max=MAX_NUM_SEQS, help="Decoding requests")] = 256,
    drafts: Annotated[int, typer.Option(min=1, max=MAX_SPECULATIVE_TOKENS, help="Drafts a request and step")] = 4,
    target_ms: Annotated[float, typer.Option(min=0, help="One pass of the target")] = 20.0,
    draft_ms: Annotated[float, typer.Option(min=0, help="One pass of the drafter over a token a request")] = 5.0,
    ingest_ms: Annotated[
        float | None, typer.Option(min=0, help="The drafter's pass behind verification; default: as --draft-ms")
    ] = None,
    planning_ms: Annotated[float, typer.Option(min=0, help="Least time of a plan, on the planner's thread")] = 0.0,
    steps: Annotated[int, typer.Option(min=1, help="Measured decode steps")] = 100,
    trace: Annotated[Path | None, typer.Option(help="File for the first steps' trace, for ui.perfetto.dev")] = None,
    as_json: Json = False,
) -> None:
    """The engine's loop on a simulated device: the share of a step in which the device has nothing to run."""
    from sonar_engine.bench.overlap import OverlapSettings, chrome_trace, measure_overlap

    if trace is not None and trace.is_dir():
        raise ConfigError(f"--trace {trace}: this is a folder; give a file's name")
    if trace is not None and not trace.parent.is_dir():
        raise ConfigError(f"--trace {trace}: there is no folder {trace.parent}; make it first")
    for option, value in {"target": target_ms, "draft": draft_ms, "ingest": ingest_ms, "planning": planning_ms}.items():
        if value is not None and math.isinf(value):
            raise ConfigError(f"--{option}-ms {value}: must be a number of milliseconds, such as 5")
    settings = OverlapSettings(
        schedule,
        requests,
        drafts,
        steps,
        target=target_ms / 1e3,
        draft=draft_ms / 1e3,
        ingest=(draft_ms if ingest_ms is None else ingest_ms) / 1e3,
        planning=planning_ms / 1e3,
    )
    with nullcontext() if trace is None else replacing(trace) as part:  # a place that cannot be written is told first
        figures, timeline = measure_overlap(settings)
        if part is not None:
            part.write_text(json.dumps(chrome_trace(timeline)))
    _print([figures], as_json)


def _opponent(name: str | None) -> Opponent | None:
    if name not in (None, "transformers"):
        raise ConfigError(f"--compare {name}: unknown; right: --compare transformers")
    return None if name is None else "transformers"


def _whole_numbers(text: str, option: str, least: int, most: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least or max(numbers) > most:
        raise ConfigError(f"{option} {text}: must be whole numbers from {least} to {most}, such as 1,8,32")
    return numbers


def _print(results: Iterable[Measurement], as_json: bool) -> None:
    """JSON Lines as each result comes, or one table with a head of the first result's keys."""
    widths: list[int] = []
    for result in results:
        if as_json:
            print(json.dumps(result), flush=True)
            continue
        shown = [f"{value:,.1f}" if isinstance(value, float) else str(value) for value in result.values()]
        if not widths:
            widths = [max(len(key), 10) for key in result]
            print("  ".join(key.rjust(width) for key, width in zip(result, widths, strict=True)))
        print("  ".join(value.rjust(width) for value, width in zip(shown, widths, strict=True)), flush=True)
