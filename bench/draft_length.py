"""The adaptive draft length against every fixed one, 0 included: is it ever slower than the best of them?

Two engines hold the same model: one adapts, the other drafts a fixed number of tokens a run. All run the same greedy
load in turn, adaptive first and fixed first alternately; for each fixed length the median of the ratios is printed with
a bootstrap interval. The last line of a load compares with the best fixed length: in each pair the one that is best in
all other pairs, since the best of several noisy figures is a lucky one as well. Prompts stay in the prefix cache, so
that runs are decoding alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from paired import interval, tokens_per_second, write_texts
from sonar_engine.bench.generation import encoded_prompts
from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.engine import Engine, build_engine
from sonar_engine.types import SamplingParams

BEST = 0.98  # of the best fixed length's speed is as good as it


@dataclass(frozen=True)
class Load:
    """One way of drafting at one batch size."""

    drafter: str  # ngram, or the oracle's rate
    prompts: list[list[int]]
    output_len: int

    def params(self, length: int | None) -> SamplingParams:
        """None: as many drafts as the engine sees fit."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.output_len,
            ignore_eos=True,
            speculative_enabled=length != 0,
            num_speculative_tokens=length or None,
        )


def build(arguments: argparse.Namespace, batch: int, **speculative: Any) -> Engine:
    return build_engine(
        EngineConfig(
            model=arguments.model,
            dtype=arguments.dtype,
            max_num_seqs=batch,
            speculative=SpeculativeConfig(**speculative),
        )
    )


def make_prompts(engine: Engine, batch: int) -> list[list[int]]:
    """The prompts of the set, then the same ones from another start."""
    prompts = encoded_prompts(engine)
    return [prompts[i % len(prompts)][i // len(prompts) :] for i in range(batch)]


def drafting(drafter: str, texts: Path, most: int) -> dict[str, Any]:
    if drafter == "ngram":
        return {"method": "ngram", "num_speculative_tokens": most}
    oracle = {"method": "oracle", "oracle_texts": str(texts), "oracle_rates": (float(drafter),)}
    return {**oracle, "num_speculative_tokens": most}


def measure(arguments: argparse.Namespace, drafter: str, batch: int) -> dict[int | None, list[float]]:
    """Tokens/s of each run by length, None the adaptive one."""
    most = max(arguments.lengths)
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.jsonl"
        plain = build(arguments, batch)
        load = Load(drafter, make_prompts(plain, batch), arguments.output_len)
        write_texts(plain, load.prompts, load.params(0), texts)
        plain.close()
        adaptive = build(arguments, batch, **drafting(drafter, texts, most), draft_length="adaptive")
        fixed = build(arguments, batch, **drafting(drafter, texts, most))
    engines: dict[int | None, Engine] = {None: adaptive, **dict.fromkeys(arguments.lengths, fixed)}
    rates: dict[int | None, list[float]] = {length: [] for length in engines}
    for pair in range(-arguments.warm_up, arguments.pairs):
        for length in engines if pair % 2 else reversed(engines):
            rate = tokens_per_second(engines[length], load.prompts, load.params(length))
            if pair >= 0:
                rates[length].append(rate)
    for engine in (adaptive, fixed):
        engine.close()
    return rates


def rows(rates: dict[int | None, list[float]], drafter: str, batch: int) -> Iterator[dict[str, Any]]:
    """One row a fixed length, then one of the best of them."""
    fixed = {length: np.array(values) for length, values in rates.items() if length is not None}
    adaptive = np.array(rates[None])
    lengths: list[int | str] = [*fixed, "best"]
    for length, others in zip(lengths, [*fixed.values(), best_of_other_pairs(fixed)], strict=True):
        ratios = adaptive / others
        low, high = interval(ratios)
        yield {
            "drafter": drafter,
            "batch": batch,
            "length": length,
            "tokens_per_second": float(np.median(others)),
            "adaptive_tokens_per_second": float(np.median(adaptive)),
            "ratio": float(np.median(ratios)),
            "low": low,
            "high": high,
            "pairs": len(ratios),
        }


def best_of_other_pairs(fixed: dict[int, np.ndarray]) -> np.ndarray:
    """For each pair the tokens/s of the length whose median over the other pairs is the highest."""
    values = np.stack(list(fixed.values()))
    pairs = range(values.shape[1])
    best = [np.argmax(np.median(np.delete(values, pair, axis=1), axis=1)) for pair in pairs]
    return values[best, pairs]


def show(row: dict[str, Any]) -> str:
    is_best = row["length"] == "best"
    verdict = "" if not is_best else "  as good" if row["ratio"] >= BEST else "  SLOWER"
    return (
        f"{row['drafter']:>6}  batch {row['batch']:>3}  adaptive / {row['length']:<4} {row['ratio']:.3f}"
        f"  [{row['low']:.3f}, {row['high']:.3f}]  {row['tokens_per_second']:.1f} tokens/s{verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--drafters", nargs="+", default=["ngram", "0.3", "0.8"], help="ngram, or rates of the oracle")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--lengths", nargs="+", type=int, default=[0, 1, 2, 3, 4, 6, 8], help="fixed draft lengths")
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2, help="pairs before the ones that count")
    parser.add_argument("--json", action="store_true", help="one object a line")
    arguments = parser.parse_args()
    for batch in arguments.batches:
        for drafter in arguments.drafters:
            for row in rows(measure(arguments, drafter, batch), drafter, batch):
                print(json.dumps(row) if arguments.json else show(row), flush=True)


if __name__ == "__main__":
    main()
