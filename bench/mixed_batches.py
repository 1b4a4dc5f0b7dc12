"""Drafting in steps that also hold prompt tokens, against leaving it to decode-only steps.

Prompts keep arriving while others decode: the next one is submitted whenever a sequence ends. Both engines, and one
without drafting, run the same load in turn; the median of the ratios is printed with a bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from paired import interval, tokens_per_second, write_texts
from sonar_engine.bench.generation import encoded_prompts
from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.engine import Engine, build_engine
from sonar_engine.types import SamplingParams


def build(arguments: argparse.Namespace, **speculative: Any) -> Engine:
    return build_engine(
        EngineConfig(
            model=arguments.model,
            max_num_seqs=arguments.streams,
            enable_prefix_caching=False,
            speculative=SpeculativeConfig(**speculative),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=4, help="sequences at once")
    parser.add_argument("--rate", type=float, default=0.8, help="how often the oracle's draft is right")
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--output-len", type=int, default=24, help="tokens an output, more or less")
    parser.add_argument("--prompts", type=int, default=24, choices=range(1, 61), metavar="1..60")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    lens = np.random.default_rng(0).integers(arguments.output_len // 2, 2 * arguments.output_len, arguments.prompts)
    params = [SamplingParams(temperature=0.0, max_tokens=int(length), ignore_eos=True) for length in lens]
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.jsonl"
        off = build(arguments)
        prompts = encoded_prompts(off)[: arguments.prompts]
        write_texts(off, prompts, params, texts)
        oracle = {
            "method": "oracle",
            "oracle_texts": str(texts),
            "oracle_rates": (arguments.rate,),
            "num_speculative_tokens": arguments.num_speculative_tokens,
        }
        engines = {
            "off": off,
            "decode-only": build(arguments, **oracle),
            "mixed": build(arguments, **oracle, speculate_in_mixed_batches=True),
        }
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for pair in range(arguments.pairs + 1):
        for name, engine in engines.items() if pair % 2 else reversed(engines.items()):
            rate = tokens_per_second(engine, prompts, params)
            if pair > 0:  # the first one warms up
                rates[name].append(rate)
    report(rates, arguments)
    for engine in engines.values():
        engine.close()


def report(rates: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    for name, base in (("decode-only", "off"), ("mixed", "off"), ("mixed", "decode-only")):
        ratios = np.array(rates[name]) / np.array(rates[base])
        low, high = interval(ratios)
        row = {
            "speculation": name,
            "against": base,
            "streams": arguments.streams,
            "rate": arguments.rate,
            "tokens_per_second": float(np.median(rates[name])),
            "ratio": float(np.median(ratios)),
            "low": low,
            "high": high,
        }
        if arguments.json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{name:>12} / {base:<12} {row['ratio']:.3f}  [{low:.3f}, {high:.3f}]"
                f"  {row['tokens_per_second']:.1f} tokens/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
