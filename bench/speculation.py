"""Speculation on and off, one stream at a time, in turn on one engine: tokens/s by kind of task.

Every prompt of `bench/prompts.jsonl` is completed greedily both ways; the completions must be the same tokens.
It drafts with what comes for the model, or as told: `--speculative-config '{"method": "ngram"}'`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from sonar_engine.bench.generation import encoded_prompts
from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.drafters.shipped import with_shipped_drafter
from sonar_engine.engine import Engine, build_engine
from sonar_engine.types import Completion, SamplingParams

# Half-open ranges of lines in the prompt file.
GROUPS = (
    ("conversation", 0, 8),
    ("code", 8, 20),
    ("summary", 20, 26),
    ("translation", 26, 33),
    ("reasoning", 33, 41),
    ("extraction", 41, 48),
    ("rewriting", 48, 55),
    ("story", 55, 60),
)


@dataclass
class Tally:
    """Sums over the prompts of one kind."""

    group: str
    num_prompts: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_same: int = 0
    seconds: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    def row(self) -> dict[str, str | int | float]:
        return {
            "group": self.group,
            "prompts": self.num_prompts,
            "tokens": self.num_tokens,
            "acceptance_length": self.num_tokens / self.num_steps,
            "tokens_per_second_off": self.num_tokens / self.seconds[False],
            "tokens_per_second_on": self.num_tokens / self.seconds[True],
            "speed_up": self.seconds[False] / self.seconds[True],
            "same_tokens": self.num_same,
        }


def measure(engine: Engine, output_len: int) -> Iterator[Tally]:
    prompts = encoded_prompts(engine)
    for speculate in (False, True):
        complete(engine, prompts[0], output_len, speculate)  # warm-up
    for group, first, last in GROUPS:
        tally = Tally(group)
        for index in range(first, last):
            add(tally, engine, prompts[index], output_len, off_first=index % 2 == 0)
        yield tally


def add(tally: Tally, engine: Engine, prompt: list[int], output_len: int, off_first: bool) -> None:
    results = {}
    for speculate in (False, True) if off_first else (True, False):
        results[speculate], seconds = complete(engine, prompt, output_len, speculate)
        tally.seconds[speculate] += seconds
    tally.num_prompts += 1
    tally.num_tokens += len(results[True].token_ids)
    speculation = results[True].metrics.speculation
    tally.num_steps += len(results[True].token_ids) - speculation.num_accepted_draft_tokens
    tally.num_same += results[True].token_ids == results[False].token_ids


def complete(engine: Engine, prompt: list[int], output_len: int, speculate: bool) -> tuple[Completion, float]:
    engine.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, speculative_enabled=speculate)
    started = time.perf_counter()
    completion = engine.generate([prompt], params)[0]
    return completion, time.perf_counter() - started


def total(tallies: list[Tally]) -> Tally:
    result = Tally("all")
    for tally in tallies:
        result.num_prompts += tally.num_prompts
        result.num_tokens += tally.num_tokens
        result.num_steps += tally.num_steps
        result.num_same += tally.num_same
        for speculate, seconds in tally.seconds.items():
            result.seconds[speculate] += seconds
    return result


def show(row: dict[str, str | int | float]) -> str:
    cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()]
    return "  ".join(cell.rjust(max(len(key), 12)) for key, cell in zip(row, cells, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--speculative-config", metavar="JSON", help="default: what comes with the package for the model"
    )
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="one object a line")
    arguments = parser.parse_args()
    config = EngineConfig(model=arguments.model, dtype=arguments.dtype)
    if arguments.speculative_config is None:
        config = with_shipped_drafter(config, "adaptive")
    else:
        speculative = SpeculativeConfig.model_validate_json(arguments.speculative_config)
        config = config.model_copy(update={"speculative": speculative})
    if config.speculative.method == "none":
        parser.error(f"nothing drafts for {arguments.model}; give --speculative-config")
    engine = build_engine(config)
    tallies = []
    for tally in measure(engine, arguments.output_len):
        tallies.append(tally)
        report(tally, arguments.json, head=len(tallies) == 1)
    report(total(tallies), arguments.json, head=False)
    engine.close()


def report(tally: Tally, as_json: bool, head: bool) -> None:
    row = tally.row()
    if as_json:
        print(json.dumps(row), flush=True)
        return
    if head:
        print("  ".join(key.rjust(12) for key in row), file=sys.stdout)
    print(show(row), flush=True)


if __name__ == "__main__":
    main()
