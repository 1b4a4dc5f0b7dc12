"""Batch-invariant mode: a sequence's logits are the same bits alone, in a crowd, in chunks and in verify rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_runs import INVARIANT_PARAMS, ModelRun, load_runner, random_tokens, run_alone, torch_threads
from sonar_engine.layers.torch_ops import BlockedLinear, TorchOps, in_blocks
from sonar_engine.model_runner import ModelRunner
from tiny_models import make_tiny

DTYPES = ("float32", "bfloat16", "float16")
# Sizes that are not multiples of a vector, heads in groups of 3, and a family with a norm on q and k.
ODD_SMOLLM = {"hidden_size": 132, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: a second thread would cost more than it gives."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module", params=["smollm", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = {**ODD_SMOLLM, "intermediate_size": 200} if request.param == "smollm" else {}
    return make_tiny(request.param, tmp_path_factory.mktemp("invariance") / request.param, **overrides)


@pytest.fixture(scope="module", params=INVARIANT_PARAMS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=DTYPES)
def runner(request: pytest.FixtureRequest, backend: str, folder: Path) -> ModelRunner:
    return load_runner(folder, backend, dtype=request.param)


@pytest.fixture(scope="module")
def sequence(runner: ModelRunner) -> tuple[list[int], torch.Tensor]:
    """45 tokens and their logits in one step alone."""
    tokens = random_tokens(runner.vocab_size, 45, seed=1)
    return tokens, run_alone(runner, tokens)


def test_alone_and_in_a_crowd_are_the_same_bits(runner: ModelRunner, sequence: tuple[list[int], torch.Tensor]) -> None:
    tokens, alone = sequence
    for size in (1, 2, 7, 16):
        run = ModelRun(runner, seed=size)
        crowd = {slot: random_tokens(runner.vocab_size, 1 + (slot * 5) % 23, seed=slot) for slot in range(size)}
        run.advance({**crowd, 30: tokens})
        assert torch.equal(run.logits(30), alone)


def test_any_chunking_of_the_prompt_gives_the_same_bits(
    runner: ModelRunner, sequence: tuple[list[int], torch.Tensor]
) -> None:
    tokens, alone = sequence
    for chunk in (1, 3, 8, 17, 44):
        run = ModelRun(runner, seed=chunk)
        for start in range(0, len(tokens), chunk):
            run.advance({0: tokens[start : start + chunk]}, decode=[0] if chunk == 1 else [])
        assert torch.equal(run.logits(0), alone)


def test_verify_rows_give_the_bits_of_plain_decoding_beside_other_rows(
    runner: ModelRunner, sequence: tuple[list[int], torch.Tensor]
) -> None:
    tokens, alone = sequence
    for num_drafts in (1, 3, 7):
        run = ModelRun(runner, seed=num_drafts)
        run.advance({0: tokens[:20], 1: random_tokens(runner.vocab_size, 9, seed=2)})
        for start in range(20, len(tokens), 1 + num_drafts):
            run.advance({0: tokens[start : start + 1 + num_drafts], 1: [4, 2], 2: [7]}, decode=[0, 1])
        assert torch.equal(run.logits(0), alone)


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mixture_of_chunks_drafts_and_rejections_gives_the_bits_of_each_sequence_alone(
    runner: ModelRunner, sequence: tuple[list[int], torch.Tensor], data: st.DataObject
) -> None:
    tokens, alone = sequence
    run = ModelRun(runner, seed=data.draw(st.integers(0, 2**16)))
    other = random_tokens(runner.vocab_size, 45, seed=9)
    while run.computed.get(0, 0) < len(tokens):
        start, length = run.computed.get(0, 0), data.draw(st.integers(1, 12))
        rows = {0: tokens[start : start + length]}
        for slot in data.draw(st.lists(st.integers(1, 6), unique=True, max_size=6)):
            at = run.computed.get(slot, 0)
            rows[slot] = other[at : at + data.draw(st.integers(1, 9))] or [1]
        decoding = data.draw(st.booleans())
        run.advance(rows, decode=[0] if decoding else [])
        rejected = data.draw(st.integers(0, len(rows[0]) - 1))
        if rejected:
            run.roll_back(0, rejected)
    assert torch.equal(run.logits(0), alone)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_a_blocked_product_ignores_its_place_and_its_neighbours(dtype: torch.dtype, num_threads: int) -> None:
    with torch_threads(num_threads):
        _check_blocked_products(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_a_blocked_product_ignores_its_place_on_cuda(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    _check_blocked_products(dtype, "cuda")


def _check_blocked_products(dtype: torch.dtype, device: str = "cpu") -> None:
    for num_inputs, num_outputs in ((64, 192), (132, 50), (576, 960), (200, 132)):
        generator = torch.Generator().manual_seed(num_inputs)
        weight = torch.randn(num_outputs, num_inputs, generator=generator).to(device, dtype)
        bias = torch.randn(num_outputs, generator=generator).to(device, dtype)
        linear = TorchOps(batch_invariant=True).linear(weight, bias)
        x = torch.randn(37, num_inputs, generator=generator).to(device, dtype)
        whole = linear(x)
        for row in range(37):
            assert torch.equal(linear(x[row : row + 1])[0], whole[row])
        assert torch.equal(linear(x.flip(0)).flip(0), whole)


def test_the_plain_product_would_not_pass_these_tests() -> None:
    """The mode is needed: on this machine some library call must depend on the number of rows, or it costs nothing."""
    generator = torch.Generator().manual_seed(0)
    differs = False
    for num_inputs, num_outputs in ((576, 960), (1536, 576), (132, 50)):
        weight = torch.randn(num_outputs, num_inputs, generator=generator)
        x = torch.randn(37, num_inputs, generator=generator)
        linear = TorchOps().linear(weight, None)
        differs |= not torch.equal(torch.cat([linear(row[None]) for row in x]), linear(x))
    assert differs


def test_blocks_have_one_shape_whatever_the_number_of_rows() -> None:
    shapes = []

    def double(block: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(block.shape))
        return 2 * block

    for num_rows in (0, 1, 7, 8, 9, 20):
        x = torch.arange(num_rows * 3, dtype=torch.float32).view(num_rows, 3)
        assert torch.equal(in_blocks(double, x, 8), 2 * x)
    assert set(shapes) == {(8, 3)}


def test_a_shape_whose_rows_depend_on_their_place_runs_a_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def uneven(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x @ weight.T + torch.arange(x.shape[0], dtype=x.dtype)[:, None]

    monkeypatch.setattr("torch.nn.functional.linear", uneven)
    linear = TorchOps(batch_invariant=True).linear(torch.ones(4, 4), None)
    assert isinstance(linear, BlockedLinear)
    assert linear.block_rows == 1
