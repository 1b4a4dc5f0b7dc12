"""Times the native CPU kernels against torch on SmolLM2-135M's shapes: ms a forward, all linears or all attention.

Usage: python bench/native_ops.py [--rows 1,4,8,32,128,512] [--threads N] [--seconds 0.5] [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import torch
from sonar_engine.attention.native_attention import NativeAttention
from sonar_engine.layers.native import NativeOps
from sonar_engine.step_buffers import BatchMetadata

NUM_LAYERS, HIDDEN, INTERMEDIATE, VOCAB = 30, 576, 1536, 49152
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
QKV = (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
LAYER_SHAPES = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]  # [out, in]


def milliseconds(call: Callable[[], object], seconds: float) -> float:
    """Least time of a call, repeated for about `seconds`."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def all_shapes() -> list[tuple[int, int]]:
    return LAYER_SHAPES * NUM_LAYERS + [(VOCAB, HIDDEN)]


def linear_times(ops: NativeOps, rows: list[int], seconds: float) -> list[dict[str, object]]:
    """Every linear of a forward, each with its own weights, so that they stream from memory."""
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(shape, generator=generator) for shape in all_shapes()]
    narrow = [weight.bfloat16() for weight in wide]
    native = [ops.linear(weight, None) for weight in narrow]
    results: list[dict[str, object]] = []
    for count in rows:
        inputs = {width: torch.randn(count, width, generator=generator) for width in (HIDDEN, INTERMEDIATE)}
        half = {width: x.bfloat16() for width, x in inputs.items()}
        times = {
            "native_bf16_ms": milliseconds(
                lambda half=half: [linear(half[linear.in_features]) for linear in native], seconds
            ),
            "torch_bf16_ms": milliseconds(
                lambda half=half: [torch.nn.functional.linear(half[w.shape[1]], w) for w in narrow], seconds
            ),
            "torch_fp32_ms": milliseconds(
                lambda inputs=inputs: [torch.nn.functional.linear(inputs[w.shape[1]], w) for w in wide], seconds
            ),
        }
        results.append({"what": "linears", "rows": count} | {name: round(value, 2) for name, value in times.items()})
    return results


def attention_times(ops: NativeOps, cases: list[tuple[int, int, int]], seconds: float) -> list[dict[str, object]]:
    """cases: (sequences, tokens of each in the step, keys of each)."""
    results: list[dict[str, object]] = []
    for num_reqs, q_len, kv_len in cases:
        page_size, pages = 16, -(-kv_len // 16)
        caches = [
            torch.randn(num_reqs * pages, 2, page_size, NUM_KV_HEADS, HEAD_DIM).bfloat16() for _ in range(NUM_LAYERS)
        ]
        attention = NativeAttention(caches, HEAD_DIM**-0.5, kernels=ops.kernels)
        attention.begin(batch_of(num_reqs, q_len, kv_len, page_size, pages))
        fused = torch.randn(num_reqs * q_len, NUM_Q_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM).bfloat16()
        q, k, v = fused.split([NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        spent = milliseconds(
            lambda attention=attention, q=q, k=k, v=v: [attention.forward(i, q, k, v) for i in range(NUM_LAYERS)],
            seconds,
        )
        case = {"what": "attention", "sequences": num_reqs, "q_len": q_len, "kv_len": kv_len}
        results.append(case | {"native_bf16_ms": round(spent, 2)})
    return results


def batch_of(num_reqs: int, q_len: int, kv_len: int, page_size: int, pages: int) -> BatchMetadata:
    table = torch.randperm(num_reqs * pages).int().view(num_reqs, pages)
    positions = torch.arange(kv_len - q_len, kv_len).repeat(num_reqs)
    rows = torch.arange(num_reqs).repeat_interleave(q_len)
    fields = {
        "num_reqs": num_reqs,
        "num_tokens": num_reqs * q_len,
        "qo_indptr": torch.arange(0, num_reqs * q_len + 1, q_len).int(),
        "slots": torch.arange(num_reqs).int(),
        "positions": positions.int(),
        "slot_mapping": (table[rows, positions // page_size] * page_size + positions % page_size).int(),
        "page_table": table,
    }
    return cast(BatchMetadata, SimpleNamespace(**fields))


def row_wise_forward(ops: NativeOps, *inputs: torch.Tensor) -> None:
    x, residual, weight, q, k, positions, table, gate_up = inputs
    for _ in range(NUM_LAYERS):
        ops.add_rms_norm(x, residual, weight, 1e-5)
        ops.rope(q, k, positions, table)
        ops.add_rms_norm(x, residual, weight, 1e-5)
        ops.silu_and_mul(gate_up)


def row_wise_times(ops: NativeOps, rows: list[int], seconds: float) -> list[dict[str, object]]:
    """Norms, rope and activation of a whole forward."""
    weight = torch.randn(HIDDEN).bfloat16()
    table = torch.randn(2048, 2, HEAD_DIM // 2)
    results: list[dict[str, object]] = []
    for count in rows:
        x, residual = torch.randn(count, HIDDEN).bfloat16(), torch.randn(count, HIDDEN).bfloat16()
        fused = torch.randn(count, NUM_Q_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM).bfloat16()
        q, k, _ = fused.split([NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        gate_up, positions = torch.randn(count, 2 * INTERMEDIATE).bfloat16(), torch.arange(count).int()

        inputs = (x, residual, weight, q, k, positions, table, gate_up)
        spent = milliseconds(lambda inputs=inputs: row_wise_forward(ops, *inputs), seconds)
        results.append({"what": "row-wise", "rows": count, "native_bf16_ms": round(spent, 2)})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,8,32,128,512")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops = NativeOps(options.threads)
    rows = [int(count) for count in options.rows.split(",")]
    cases = [(1, 1, 256), (1, 1, 2048), (1, 5, 256), (32, 1, 256), (32, 5, 256), (1, 512, 512)]
    results = attention_times(ops, cases, options.seconds)
    results += row_wise_times(ops, rows, options.seconds)
    results += linear_times(ops, rows, options.seconds)
    for result in results:
        print(json.dumps(result) if options.json else "  ".join(f"{name} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
