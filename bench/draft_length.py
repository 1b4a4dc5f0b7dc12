"""The adaptive draft length against every fixed one, 0 included: is it ever slower than the best of them?

Two engines hold the same model: one adapts, the other drafts a fixed number of tokens a run. All run the same greedy
load; after some runs that warm up, lengths far from the best are left out. Then each run with a fixed length has one
with the adaptive length right beside it, before and after it alternately; the median of the ratios is printed with a
bootstrap interval. The last line of a load compares with the best fixed length: for each pair the one that is best in
all other pairs, since the best of several noisy figures is a lucky one as well. Only steps count in which every
sequence decodes; prompts stay in the prefix cache.
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
from paired import decoding_rate, interval, write_texts
from sonar_engine.bench.generation import encoded_prompts
from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.engine import Engine, build_engine
from sonar_engine.types import SamplingParams

BEST = 0.98  # of the best fixed length's speed is as good as it
NEAR = 0.85  # of the best length's fastest run of the warm-up: lengths whose fastest is slower are left out

Pairs = list[tuple[float, float]]
"""Tokens/s, adaptive and fixed."""


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


def measure(arguments: argparse.Namespace, drafter: str, batch: int) -> dict[int, Pairs]:
    """Pairs of every length that is not far from the best."""
    most = max(arguments.lengths)
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.jsonl"
        plain = build(arguments, batch)
        load = Load(drafter, make_prompts(plain, batch), arguments.output_len)
        write_texts(plain, load.prompts, load.params(0), texts)
        plain.close()
        adaptive = build(arguments, batch, **drafting(drafter, texts, most), draft_length="adaptive")
        fixed = build(arguments, batch, **drafting(drafter, texts, most))

    def run(length: int | None) -> float:
        engine = adaptive if length is None else fixed
        return decoding_rate(engine, load.prompts, load.params(length))

    fastest = dict.fromkeys(arguments.lengths, 0.0)  # a slow moment leaves no length out
    for _ in range(arguments.warm_up):
        run(None)
        fastest = {length: max(rate, run(length)) for length, rate in fastest.items()}
    near = NEAR * max(fastest.values())
    pairs: dict[int, Pairs] = {length: [] for length, rate in fastest.items() if rate >= near}
    for i in range(arguments.pairs):
        for length, measured in pairs.items():
            rates = {each: run(each) for each in ((None, length) if i % 2 else (length, None))}
            measured.append((rates[None], rates[length]))
    for engine in (adaptive, fixed):
        engine.close()
    return pairs


def rows(pairs: dict[int, Pairs], drafter: str, batch: int) -> Iterator[dict[str, Any]]:
    """One row a fixed length, then one of the best of them."""
    rates = np.array(list(pairs.values()))  # [lengths, pairs, 2]
    best = best_of_other_pairs(rates[..., 0] / rates[..., 1])
    lengths: list[int | str] = [*pairs, "best"]
    for length, each in zip(lengths, [*rates, rates[best, np.arange(len(best))]], strict=True):
        ratios = each[:, 0] / each[:, 1]
        low, high = interval(ratios)
        yield {
            "drafter": drafter,
            "batch": batch,
            "length": length,
            "tokens_per_second": float(np.median(each[:, 1])),
            "adaptive_tokens_per_second": float(np.median(each[:, 0])),
            "ratio": float(np.median(ratios)),
            "low": low,
            "high": high,
            "pairs": len(ratios),
        }


def best_of_other_pairs(ratios: np.ndarray) -> np.ndarray:
    """[lengths, pairs], adaptive to fixed -> for each pair the length with the lowest median over the other pairs."""
    pairs = range(ratios.shape[1])
    return np.array([np.argmin(np.median(np.delete(ratios, pair, axis=1), axis=1)) for pair in pairs])


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
    parser.add_argument("--warm-up", type=int, default=3, help="runs of every length before the pairs")
    parser.add_argument("--json", action="store_true", help="one object a line")
    arguments = parser.parse_args()
    if arguments.pairs < 2:
        parser.error("--pairs must be at least 2: the best length of a pair is chosen by the others")
    for batch in arguments.batches:
        for drafter in arguments.drafters:
            for row in rows(measure(arguments, drafter, batch), drafter, batch):
                print(json.dumps(row) if arguments.json else show(row), flush=True)


if __name__ == "__main__":
    main()
