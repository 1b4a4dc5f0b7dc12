"""`sonar verify`: does speculation change what a model generates?"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonar_engine.cli.options import config_options, load_drafting_options
from sonar_engine.cli.prompts_file import Prompt, read_prompts
from sonar_engine.cli.session import Session, check_config, open_session
from sonar_engine.cli.terminal import exit_with, progress_bars
from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.errors import ConfigError, SonarError

if TYPE_CHECKING:
    from sonar_engine.lossless.report import Report
    from sonar_engine.lossless.trial import Plan, Trial

DIFFERENT, NOT_COMPARED = 1, 2  # exit codes


@config_options(EngineConfig)
def verify(
    *,
    prompts: Annotated[Path | None, typer.Option(help="JSON Lines as for generate; default: 60 of our own")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them, evenly spread")] = 20,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens a completion")] = 128,
    samples: Annotated[int, typer.Option(min=0, help="Unseeded samples on either side; 0: none")] = 4000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object")] = False,
    **options: Any,
) -> None:
    """Run prompts with speculation off and on, and compare.

    Compared are tokens at temperature 0, tokens of seeded requests at temperature 1, and the law of unseeded ones. In
    batch-invariant mode, which is on unless --no-batch-invariant is given, every difference counts; without it near
    ties are excused. Exit code 0: no difference; 1: a difference; 2: nothing could be compared, or nothing was drafted.
    """
    if options["batch_invariant"] is None:
        options["batch_invariant"] = True
    try:
        report = _compare(
            load_drafting_options(options, "fixed").engine, _asked_prompts(prompts, num_prompts), max_tokens, samples
        )
    except SonarError as error:
        exit_with(error, NOT_COMPARED)
    except Exception:  # our own fault; it must not look like a difference
        traceback.print_exc()
        sys.exit(NOT_COMPARED)
    print(json.dumps(report.to_dict()) if as_json else "\n".join(report.lines()))
    if report.different:
        sys.exit(DIFFERENT)
    sys.exit(0 if report.passed else NOT_COMPARED)


def _asked_prompts(file: Path | None, count: int) -> list[Prompt]:
    if file is None:
        from sonar_engine.bench.prompts import load_prompts

        found = load_prompts()
    else:
        found = read_prompts(file)
    count = min(count, len(found))
    return [found[index * len(found) // count] for index in range(count)]


def _compare(config: EngineConfig, prompts: list[Prompt], max_tokens: int, num_samples: int) -> Report:
    """One engine after the other, so that the one with speculation off shares nothing with the other one.

    Their unseeded requests draw from different seeds: two samples, not one twice.
    """
    from sonar_engine.lossless.report import make_report
    from sonar_engine.lossless.trial import Plan

    if config.speculative.method == "none":
        raise ConfigError(
            "speculation is off, so there is nothing to compare; give --speculative-config or --spec-method"
        )
    check_config(config)
    off = config.model_copy(update={"speculative": SpeculativeConfig(), "seed": config.seed + 1})
    with open_session(off) as session:
        plan = Plan([session.encode(prompt) for prompt in prompts], max_tokens, num_samples)
        without = _run(session, plan, "Speculation off")
    with open_session(config) as session:
        drafted = _run(session, plan, "Speculation on")
        return make_report(session.engine.info, config.batch_invariant, plan, without, drafted)


def _run(session: Session, plan: Plan, name: str) -> Trial:
    from sonar_engine.lossless.trial import run_trial

    with progress_bars() as progress:
        return run_trial(session.engine, plan, name, progress)
