"""What each norm of an MTP head is worth: one head in five variants, trained on the same states with the same steps.

`python bench/head_ablation.py --captures STATES --out RUNS --max-steps 2000 --plot losses.png`

Every variant is a run of `sonar train fit` in a folder of its own in RUNS. Killed at any moment, the same command goes
on, and variants that are through are not run again. The table goes to stdout and to RUNS/table.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonar_engine.cli.terminal import exit_with, progress_bars
from sonar_engine.config_loader import load_stage
from sonar_engine.engine import Progress
from sonar_engine.errors import DivergedError, SonarError, TrainingError
from sonar_engine.files import read_json_file, replacing, write_json
from sonar_engine.training.config import FitConfig
from sonar_engine.training.fit import fit_drafter
from sonar_engine.training.fit_log import LOG
from sonar_engine.training.journal import read_journal
from sonar_engine.training.plots import plot_losses
from sonar_engine.training.shards import ShardIndex

VARIANTS = {
    "all norms": (),
    "without input norm": ("input",),
    "without final norm": ("final",),
    "without both (EAGLE)": ("final", "input"),
    "without embedding and hidden norms": ("embedding", "feature"),
}
# Options of `sonar train fit` that all variants share.
SHARED = ("model", "init", "num_layers", "next_feature", "draft_vocab_size", "num_steps", "step_decay", "feature_loss")
SHARED += ("epochs", "max_steps", "row_tokens", "batch_rows", "learning_rate", "warmup_steps", "weight_decay", "clip")
SHARED += ("validation_share", "validation_rows", "save_every", "compute", "device", "num_threads", "seed")
TABLE = "table.md"
FINISHED = "finished.json"  # in a variant's folder: what it was made from, and whether it diverged
LAST_STEPS = 100  # whose mean is the final training loss: the loss of one step is noise


@dataclass(frozen=True)
class Outcome:
    """The end of a run, losses in nats. `validation` is as in its log; None where no state was saved."""

    steps: int
    training_loss: float
    validation: dict[str, Any] | None
    diverged: bool

    @classmethod
    def read(cls, run: Path) -> Outcome:
        lines = list(read_journal(run / LOG))
        losses = [line["loss"] for line in lines if "loss" in line]
        checks = [line["validation"] for line in lines if "validation" in line]
        diverged: bool = read_json_file(run / FINISHED, "bench/head_ablation.py")["diverged"]
        if not checks and not diverged:
            raise TrainingError(f"{run}: no text was kept out to validate with; raise --validation-share")
        last = losses[-LAST_STEPS:]
        mean = sum(last) / len(last) if last else float("nan")
        return cls(len(losses), mean, checks[-1] if checks else None, diverged)

    def cells(self) -> list[str]:
        if self.diverged or self.validation is None:
            return [f"diverged at step {self.steps + 1:,}"]
        figures = [self.training_loss, self.validation["loss"], *self.validation["conditional"]]
        return [*(f"{figure:.3f}" for figure in figures), f"{self.validation['acceptance_length']:.3f}"]


def folder_of(norms: tuple[str, ...]) -> str:
    return "-".join(("without", *norms)) if norms else "all"


def config_of(arguments: argparse.Namespace, norms: tuple[str, ...]) -> FitConfig:
    shared = {name: getattr(arguments, name) for name in SHARED}
    places = {"captures": arguments.captures, "out": arguments.out / folder_of(norms)}
    return load_stage(FitConfig, {**shared, **places, "without_norms": list(norms)})


def run_variant(config: FitConfig, name: str, progress: Progress) -> None:
    """Trains to the end or to where it diverges; does nothing where that was done. Raises a SonarError."""
    marker = config.out / FINISHED
    states = [ShardIndex.read(folder).texts_sha256 for folder in config.captures]
    made_from = {"settings": config.settings(), "states": states}
    if marker.exists() and read_json_file(marker, "bench/head_ablation.py").get("made_from") == made_from:
        return

    def show(what: str, done: int, total: int) -> None:
        progress(f"{what} {name}", done, total)

    def say(line: str) -> None:
        print(f"{name}: {line}", file=sys.stderr, flush=True)

    diverged = False
    try:
        fit_drafter(config, show, say)
    except DivergedError as error:
        say(str(error))
        diverged = True
    write_json(marker, {"made_from": made_from, "diverged": diverged})


def table(outcomes: dict[str, Outcome], num_steps: int) -> Iterator[str]:
    """Markdown: losses in nats, conditional acceptance by position, the simulated acceptance length."""
    positions = [f"position {position}" for position in range(1, num_steps + 1)]
    head = ["head", "training loss", "validation loss", *positions, "acceptance length"]
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for name, outcome in outcomes.items():
        cells = outcome.cells()
        yield f"| {' | '.join([name, *cells, *[''] * (len(head) - 1 - len(cells))])} |"


def compare(arguments: argparse.Namespace, progress: Progress) -> list[str]:
    """All variants, and the table's lines."""
    configs = {name: config_of(arguments, norms) for name, norms in VARIANTS.items()}
    for name, config in configs.items():
        run_variant(config, name, progress)
    lines = list(table({name: Outcome.read(config.out) for name, config in configs.items()}, config.num_steps))
    with replacing(arguments.out / TABLE) as part:
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        plot_losses({name: config.out for name, config in configs.items()}, arguments.plot)
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--captures", nargs="+", required=True, help="folders of `sonar train capture`; all are used")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG of the losses of all variants")
    fit = parser.add_argument_group("options of `sonar train fit`, for all variants alike")
    for name in SHARED:
        text = (FitConfig.model_fields[name].description or "").replace("%", "%%")
        fit.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=text)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    try:
        with progress_bars(lines_without_terminal=True) as progress:
            lines = compare(arguments, progress)
    except SonarError as error:
        exit_with(error, 1)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
