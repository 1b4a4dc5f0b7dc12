"""The Rust CPU kernels against torch, and their independence of batch, split and thread count."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sonar_engine.attention.native_attention import NativeAttention
from sonar_engine.errors import ConfigError
from sonar_engine.layers.native import NativeOps
from sonar_engine.sampling.coins import Seeds
from sonar_engine.sampling.sampler import Sampler
from sonar_engine.sampling.state import SAMPLED
from sonar_engine.step_buffers import BatchMetadata
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return NativeOps(2)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_equal_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    size = torch.int32 if found.dtype == torch.float32 else torch.int16
    assert torch.equal(found.contiguous().view(size), expected.contiguous().view(size))


# Linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"), [(1, 17, 5), (2, 100, 77), (7, 960, 576), (130, 49, 97)]
)
def test_a_linear_is_within_rounding_of_float64(
    ops: NativeOps, dtype: torch.dtype, rows: int, out_features: int, in_features: int
) -> None:
    x, weight = normal(rows, in_features, dtype=dtype), normal(out_features, in_features, dtype=dtype, seed=1)
    bias = normal(out_features, dtype=dtype, seed=2)
    found = ops.linear(weight, bias)(x)
    expected = x.double() @ weight.double().T + bias.double()
    magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    bound = UNIT_ROUNDOFF[dtype] * expected.abs() + 2.0**-23 * math.sqrt(in_features) * magnitude
    assert found.dtype == dtype
    assert bool(((found.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 32, 65, 130])
def test_a_row_does_not_depend_on_how_many_rows_are_multiplied(ops: NativeOps, rows: int) -> None:
    x, weight = normal(130, 576, dtype=torch.bfloat16), normal(200, 576, dtype=torch.bfloat16, seed=1)
    linear = ops.linear(weight, None, out_dtype=torch.float32)
    assert_equal_bits(linear(x[:rows]), linear(x)[:rows])


def test_a_linear_does_not_depend_on_threads_or_vector_width(ops: NativeOps) -> None:
    x, weight = normal(19, 96, dtype=torch.bfloat16), normal(200, 96, dtype=torch.bfloat16, seed=1)
    expected = ops.linear(weight, None, out_dtype=torch.float32)(x)
    for other in (NativeOps(1), NativeOps(3), NativeOps(2, force_scalar=True)):
        assert_equal_bits(other.linear(weight, None, out_dtype=torch.float32)(x), expected)


def test_a_linear_takes_strided_rows_and_more_dimensions(ops: NativeOps) -> None:
    x, weight = normal(6, 200), normal(33, 64, seed=1)
    linear = ops.linear(weight, None)
    assert_equal_bits(linear(x[:, 10:74]), linear(x[:, 10:74].contiguous()))
    assert_equal_bits(linear(x[:, :64].reshape(2, 3, 64)).view(6, 33), linear(x[:, :64].contiguous()))
    assert linear(x[:0, :64]).shape == (0, 33)


def test_a_linear_refuses_a_wrong_width(ops: NativeOps) -> None:
    with pytest.raises(ConfigError, match="63 features does not fit a weight of 64"):
        ops.linear(normal(8, 64), None)(normal(1, 63))
    with pytest.raises(ConfigError, match="bias"):
        ops.linear(normal(8, 64), normal(7))
    with pytest.raises(ConfigError, match="float64"):
        ops.linear(normal(8, 64, dtype=torch.float64), None)


# Rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 64, 576, 577])
def test_rms_norm_equals_llamas(ops: NativeOps, dtype: torch.dtype, width: int) -> None:
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    norm.weight.data.copy_(normal(width, seed=3))
    x = normal(9, width, dtype=dtype) * 3
    with torch.no_grad():
        torch.testing.assert_close(
            ops.rms_norm(x, norm.weight, 1e-5), norm(x), rtol=2 * UNIT_ROUNDOFF[dtype], atol=1e-6
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_normalises_the_rounded_sum(ops: NativeOps, dtype: torch.dtype) -> None:
    x, residual, weight = (
        normal(5, 96, dtype=dtype),
        normal(5, 96, dtype=dtype, seed=1),
        normal(96, dtype=dtype, seed=2),
    )
    total = x + residual
    y, summed = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert_equal_bits(summed, total)
    assert_equal_bits(y, ops.rms_norm(total, weight, 1e-6))


def test_a_norm_does_not_depend_on_the_other_rows(ops: NativeOps) -> None:
    x, weight = normal(300, 576, dtype=torch.bfloat16), normal(576, dtype=torch.bfloat16, seed=1)
    assert_equal_bits(ops.rms_norm(x[17:18], weight, 1e-5), ops.rms_norm(x, weight, 1e-5)[17:18])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 40])
def test_silu_and_mul_equals_torch(ops: NativeOps, dtype: torch.dtype, rows: int) -> None:
    x = normal(rows, 2 * 777, dtype=dtype) * 4
    expected = torch.nn.functional.silu(x[:, :777]) * x[:, 777:]
    torch.testing.assert_close(ops.silu_and_mul(x), expected, rtol=2 * UNIT_ROUNDOFF[dtype] + 1e-6, atol=1e-6)


def cos_sin_table(max_positions: int, head_dim: int) -> torch.Tensor:
    angles = torch.arange(max_positions)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return torch.stack([angles.cos(), angles.sin()], dim=1).contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_rope_rotates_strided_heads_in_place(ops: NativeOps, dtype: torch.dtype, head_dim: int) -> None:
    tokens, num_q_heads, num_kv_heads = 5, 4, 2
    fused = normal(tokens, (num_q_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    positions = torch.tensor([3, 0, 17, 5, 99], dtype=torch.int32)
    table = cos_sin_table(100, head_dim)
    before = fused.clone()
    q = fused[:, : num_q_heads * head_dim].view(tokens, num_q_heads, head_dim)
    k = fused[:, num_q_heads * head_dim : (num_q_heads + num_kv_heads) * head_dim].view(tokens, num_kv_heads, head_dim)
    cos, sin = (table[positions.long(), i].repeat(1, 2)[None] for i in (0, 1))
    expected = apply_rotary_pos_emb(q.float().transpose(0, 1)[None], k.float().transpose(0, 1)[None], cos, sin)
    ops.rope(q, k, positions, table)
    for found, wanted in zip((q, k), expected, strict=True):
        torch.testing.assert_close(
            found.float(),
            wanted[0].transpose(0, 1),
            rtol=UNIT_ROUNDOFF[dtype],
            atol=2 * UNIT_ROUNDOFF[torch.float32] * 8,
        )
    rest = slice((num_q_heads + num_kv_heads) * head_dim, None)
    assert_equal_bits(fused[:, rest], before[:, rest])


# Attention


@dataclass(frozen=True)
class Model:
    """One layer's attention over a paged cache, with each row's pages in random order."""

    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    max_pages: int = 24
    max_rows: int = 6
    window: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def page_table(self) -> torch.Tensor:
        order = torch.randperm(self.max_rows * self.max_pages, generator=torch.Generator().manual_seed(7))
        return order.to(torch.int32).view(self.max_rows, self.max_pages)

    def new_attention(self, num_threads: int = 2, **options: Any) -> NativeAttention:
        shape = (self.max_rows * self.max_pages, 2, self.page_size, self.num_kv_heads, self.head_dim)
        cache = torch.full(shape, torch.nan, dtype=self.dtype)  # what was never written must never count
        return NativeAttention([cache], self.scale, self.window, num_threads, **options)

    def sequence(self, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = (self.num_q_heads, self.num_kv_heads, self.num_kv_heads)
        parts = [
            normal(length, heads, self.head_dim, dtype=self.dtype, seed=10 * seed + i) for i, heads in enumerate(sizes)
        ]
        return parts[0], parts[1], parts[2]


def batch_of(model: Model, rows: list[tuple[int, int, int]]) -> BatchMetadata:
    """rows: (slot, first position, tokens)."""
    positions = torch.cat([torch.arange(first, first + count) for _, first, count in rows])
    slots_of_tokens = torch.cat([torch.full((count,), slot) for slot, _, count in rows])
    table = model.page_table()
    pages = table[slots_of_tokens, positions // model.page_size]
    fields = {
        "num_reqs": len(rows),
        "num_tokens": len(positions),
        "qo_indptr": torch.tensor([0, *np.cumsum([count for _, _, count in rows])], dtype=torch.int32),
        "slots": torch.tensor([slot for slot, _, _ in rows], dtype=torch.int32),
        "positions": positions.int(),
        "slot_mapping": (pages * model.page_size + positions % model.page_size).int(),
        "page_table": table,
    }
    return cast(BatchMetadata, SimpleNamespace(**fields))


def run_steps(
    model: Model, attention: NativeAttention, lengths: dict[int, int], steps: list[list[tuple[int, int, int]]]
) -> dict[int, torch.Tensor]:
    """Runs the steps; returns each slot's outputs [length, Hq * D]."""
    sequences = {slot: model.sequence(length, slot) for slot, length in lengths.items()}
    width = model.num_q_heads * model.head_dim
    outputs = {slot: torch.empty(length, width, dtype=model.dtype) for slot, length in lengths.items()}
    for rows in steps:
        attention.begin(batch_of(model, rows))
        q, k, v = (torch.cat([sequences[s][i][first : first + n] for s, first, n in rows]) for i in range(3))
        out = attention.forward(0, q, k, v)
        start = 0
        for slot, first, count in rows:
            outputs[slot][first : first + count] = out[start : start + count]
            start += count
    return outputs


def plain_attention(model: Model, length: int, slot: int) -> torch.Tensor:
    q, k, v = (part.double() for part in model.sequence(length, slot))
    group = model.num_q_heads // model.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * model.scale
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    hidden = (distance < 0) | (distance >= (model.window or length))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)


MODELS = [
    Model(),
    Model(dtype=torch.bfloat16),
    Model(dtype=torch.float16, num_q_heads=9, num_kv_heads=3),
    Model(num_q_heads=4, num_kv_heads=4, head_dim=40, page_size=1, max_pages=300),
    Model(num_q_heads=32, num_kv_heads=1, head_dim=128),
    Model(head_dim=8, page_size=5, max_pages=64),
    Model(head_dim=256, num_q_heads=2, num_kv_heads=1),
    Model(window=33),
    Model(window=1),
]


@pytest.mark.parametrize("model", MODELS)
def test_attention_equals_a_plain_softmax(model: Model) -> None:
    lengths = {3: 200, 0: 1, 5: 64, 2: 130}
    steps = [
        [(3, 0, 60), (0, 0, 1)],
        [(5, 0, 63), (3, 60, 70), (2, 0, 128)],
        [(2, 128, 1), (3, 130, 5), (5, 63, 1)],
        [(2, 129, 1), (3, 135, 65)],
    ]
    found = run_steps(model, model.new_attention(), lengths, steps)
    for slot, length in lengths.items():
        expected = plain_attention(model, length, slot)
        tolerance = max(2e-6, 2 * UNIT_ROUNDOFF[model.dtype])
        torch.testing.assert_close(found[slot].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("model", [Model(dtype=torch.bfloat16), Model(window=70), Model(num_q_heads=2)])
def test_attention_does_not_depend_on_batch_or_split(model: Model) -> None:
    whole = run_steps(model, model.new_attention(1), {3: 200}, [[(3, 0, 200)]])[3]
    splits = [
        [[(3, i, 1)] for i in range(200)],
        [[(3, 0, 5)], [(3, 5, 64)], [(3, 69, 1)], [(3, 70, 130)]],
        [[(2, 0, 77), (3, 0, 150)], [(3, 150, 3), (2, 77, 20)], [(1, 0, 9), (3, 153, 47)]],
    ]
    for steps in splits:
        found = run_steps(model, model.new_attention(3), {3: 200, 2: 97, 1: 9}, steps)[3]
        assert_equal_bits(found, whole)


def test_attention_does_not_depend_on_vector_width() -> None:
    model = Model(dtype=torch.bfloat16)
    steps = [[(3, 0, 90), (2, 0, 40)], [(2, 40, 1), (3, 90, 4)]]
    expected = run_steps(model, model.new_attention(), {3: 94, 2: 41}, steps)
    scalar = NativeOps(2, force_scalar=True).kernels
    assert scalar.level == "scalar"
    found = run_steps(model, model.new_attention(kernels=scalar), {3: 94, 2: 41}, steps)
    for slot in (2, 3):
        assert_equal_bits(found[slot], expected[slot])


def test_attention_takes_views_of_a_fused_projection() -> None:
    model = Model(dtype=torch.bfloat16)
    q, k, v = model.sequence(40, 1)
    fused = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)
    widths = [heads * model.head_dim for heads in (model.num_q_heads, model.num_kv_heads, model.num_kv_heads)]
    views = [part.unflatten(1, (-1, model.head_dim)) for part in fused.split(widths, dim=1)]
    attention = model.new_attention()
    attention.begin(batch_of(model, [(1, 0, 40)]))
    assert_equal_bits(attention.forward(0, *views), attention.forward(0, q, k, v))


def test_attention_refuses_what_does_not_fit() -> None:
    model = Model()
    attention = model.new_attention()
    q, k, v = model.sequence(4, 0)
    with pytest.raises(ConfigError, match="begin"):
        attention.forward(0, q, k, v)
    attention.begin(batch_of(model, [(0, 0, 4)]))
    with pytest.raises(ConfigError, match="float32"):
        attention.forward(0, q.half(), k, v)
    with pytest.raises(IndexError, match="layer 1 is beyond"):
        attention.forward(1, q, k, v)
    with pytest.raises(ConfigError, match="multiple of 8"):
        replace(model, head_dim=12).new_attention()


# Sampling


def coin_bits(ids: np.ndarray, seed_lo: int, seed_hi: int, position: int) -> np.ndarray:
    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
        return x ^ (x >> 16)

    h = mix(ids.astype(np.uint32) * np.uint32(0x9E3779B9) + np.uint32(seed_lo)) ^ np.uint32(seed_hi)
    return mix(mix(h) + np.array([position], dtype=np.uint32) * np.uint32(0x85EBCA6B))


def gumbel_scores(logits: np.ndarray, inverse: float, seed_lo: int, seed_hi: int, position: int) -> np.ndarray:
    h = coin_bits(np.arange(len(logits)), seed_lo, seed_hi, position)
    u = (h.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    with np.errstate(divide="ignore"):
        return logits.astype(np.float64) * inverse - np.log(-np.log1p(-u.astype(np.float64)))


def words(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint32).view(np.int32))


def draw(ops: NativeOps, logits: torch.Tensor, inverse: torch.Tensor, *words: torch.Tensor) -> torch.Tensor:
    """Tokens int32 [S] of logits [S, V]; `words` are the low and high halves of the seeds, and the positions."""
    low, high, positions = words
    rows = SimpleNamespace(all_uses=SAMPLED, inv_temperature=inverse, seeds=Seeds(low, high), positions=positions)
    return Sampler(torch.device("cpu"), ops.kernels).sample(logits, rows)


def test_sampled_tokens_are_the_argmax_of_logits_and_coins(ops: NativeOps) -> None:
    rows, vocab = 40, 20011
    logits = normal(rows, vocab)
    inverse = torch.linspace(0.2, 3.0, rows)
    lo, hi, counter = (words(*(factor * (i + 1) % 2**32 for i in range(rows))) for factor in (2654435761, 40503, 7))
    found = draw(ops, logits, inverse, lo, hi, counter)
    for row in range(rows):
        seeds = [int(part.numpy().view(np.uint32)[row]) for part in (lo, hi, counter)]
        scores = gumbel_scores(logits[row].numpy(), float(inverse[row]), *seeds)
        assert scores.max() - scores[int(found[row])] < 1e-5


def test_greedy_rows_take_the_lowest_of_equal_logits(ops: NativeOps) -> None:
    logits = normal(4, 30000).clamp(max=2.0)
    logits[2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 29999] = -5.0
    zero = words(0, 0, 0, 0)
    found = draw(ops, logits, torch.zeros(4), zero, zero, zero)
    first = [int((logits[row] == logits[row].max()).nonzero()[0]) for row in range(4)]
    assert found.tolist() == first


def test_sampling_does_not_depend_on_the_other_rows(ops: NativeOps) -> None:
    logits = normal(8, 9000)
    inverse, lo, hi, counter = torch.ones(8), words(*range(8)), words(*range(8)), words(*range(8))
    together = draw(ops, logits, inverse, lo, hi, counter)
    for row in range(8):
        one = slice(row, row + 1)
        alone = draw(NativeOps(1), logits[one], inverse[one], lo[one], hi[one], counter[one])
        assert int(alone[0]) == int(together[row])
