"""What batch invariance costs: one step of the model with and without it, side by side in one run.

    python bench/batch_invariance.py [--model smollm2-135m] [--dtype bfloat16] [--threads 2] [--repeats 5] [--json]

Three ways to compute the same step: torch as it comes, torch in the batch-invariant mode, and the native CPU kernels,
which are invariant by construction. Their steps alternate, so that a noisy machine disturbs all of them alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from sonar_engine.config import EngineConfig
from sonar_engine.model_runner import ModelRunner
from sonar_engine.models.registry import resolve_model
from sonar_engine.step_buffers import BatchMetadata

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from batches import BatchRow, PagedBatches

CONTEXT = 128  # tokens each decoding sequence has already
STEPS = {"decode, 1 row": (1, 1), "decode, 8 rows": (8, 1), "decode, 32 rows": (32, 1), "prompt of 128": (1, 128)}
WAYS = {
    "torch": {"linear_backend": "torch", "attention_backend": "torch"},
    "torch_invariant": {"linear_backend": "torch", "attention_backend": "torch", "batch_invariant": True},
    "native": {"linear_backend": "native", "attention_backend": "native", "batch_invariant": True},
}


def main() -> None:
    arguments = _arguments()
    runners = {name: _load(arguments, options) for name, options in WAYS.items()}
    if not arguments.json:
        print(f"{arguments.model}, {arguments.dtype}, {torch.get_num_threads()} threads; median ms a step")
        print(f"{'':18}{'torch':>10}{'invariant':>11}{'ratio':>8}{'native':>10}{'ratio':>8}")
    for step, (num_rows, num_tokens) in STEPS.items():
        milliseconds = _measure(runners, num_rows, num_tokens, arguments.repeats)
        _report(arguments, step, milliseconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one object a line")
    return parser.parse_args()


def _load(arguments: argparse.Namespace, options: dict[str, object]) -> ModelRunner:
    sizes = {
        "device": "cpu",
        "max_model_len": 512,
        "max_num_seqs": 32,
        "kv_cache_tokens": 32 * 256,
        "num_threads": arguments.threads,
    }
    config = EngineConfig(model=arguments.model, dtype=arguments.dtype, **sizes, **options)
    return ModelRunner.load(config, resolve_model(arguments.model))


def _measure(runners: dict[str, ModelRunner], num_rows: int, num_tokens: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of a step by way; the ways alternate."""
    batches = {name: _batch(runner, num_rows, num_tokens) for name, runner in runners.items()}
    times: dict[str, list[float]] = {name: [] for name in runners}
    for repeat in range(1 + repeats):
        for name, runner in runners.items():
            start = time.perf_counter()
            runner.logits(runner.forward(batches[name]), batches[name].sample_rows)
            if repeat:  # the first run warms caches
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def _batch(runner: ModelRunner, num_rows: int, num_tokens: int) -> BatchMetadata:
    plan = runner.kv_cache.plan
    pages = PagedBatches(
        num_pages=plan.num_pages, page_size=plan.page_size, max_num_seqs=num_rows, max_pages=plan.max_pages_per_seq
    )
    context = CONTEXT if num_tokens == 1 else 0
    tokens = list(range(100, 100 + num_tokens))
    return pages.build([BatchRow(slot, context, tokens, decode=num_tokens == 1) for slot in range(num_rows)])


def _report(arguments: argparse.Namespace, step: str, milliseconds: dict[str, float]) -> None:
    plain = milliseconds["torch"]
    if arguments.json:
        ratios = {f"{name}_ratio": round(value / plain, 3) for name, value in milliseconds.items() if name != "torch"}
        figures = {f"{name}_ms": round(value, 2) for name, value in milliseconds.items()}
        print(
            json.dumps(
                {
                    "step": step,
                    "model": arguments.model,
                    "dtype": arguments.dtype,
                    "threads": arguments.threads,
                    **figures,
                    **ratios,
                }
            )
        )
        return
    invariant, native = milliseconds["torch_invariant"], milliseconds["native"]
    print(f"{step:18}{plain:10.1f}{invariant:11.1f}{invariant / plain:8.2f}{native:10.1f}{native / plain:8.2f}")


if __name__ == "__main__":
    main()
