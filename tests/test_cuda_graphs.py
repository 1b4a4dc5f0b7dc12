"""Captured passes: which shapes there are, what padding leaves alone, and that nothing else changes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import BatchRow, PagedBatches
from conftest import BuildEngine
from graph_stand_in import StandIn, graphs_on_a_cpu
from model_runs import BACKEND_PARAMS, ModelRun, load_runner, random_tokens
from sonar_engine import cuda_graphs
from sonar_engine.config import EngineConfig
from sonar_engine.cuda_graphs import graph_shapes, row_buckets, wants_graphs
from sonar_engine.engine import Engine
from sonar_engine.errors import ConfigError
from sonar_engine.fixed_batch import FixedBatch
from sonar_engine.kv_cache import KvCache, KvCachePlan, allocate_kv_cache
from sonar_engine.model_runner import ModelRunner
from sonar_engine.types import Completion, SamplingParams
from test_attention import MODEL
from test_engine import ids, make_prompts
from tiny_heads import make_head
from tiny_models import make_tiny

K = 3
DRAFTING = {"method": "ngram", "num_speculative_tokens": K}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)


# Shapes


def test_numbers_of_rows_grow_by_a_third_or_a_half_and_end_at_the_most() -> None:
    assert row_buckets(1) == [1]
    assert row_buckets(3) == [1, 2, 3]
    assert row_buckets(8) == [1, 2, 4, 8]
    assert row_buckets(64) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    assert row_buckets(70) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 70]


def test_shapes_are_one_token_a_row_and_every_draft_length_that_is_usual() -> None:
    def q_lens(**options: Any) -> list[int]:
        return sorted({shape.q_len for shape in graph_shapes(EngineConfig(max_num_seqs=6, **options))})

    assert q_lens() == [1]
    assert q_lens(speculative=DRAFTING) == [1, 4]
    assert q_lens(speculative={**DRAFTING, "draft_length": "adaptive"}) == [1, 2, 3, 4]
    rows = [shape.num_rows for shape in graph_shapes(EngineConfig(max_num_seqs=6))]
    assert rows == [1, 2, 4, 6]


def test_no_shape_is_larger_than_a_graph_may_be() -> None:
    shapes = graph_shapes(EngineConfig(max_num_seqs=4096, speculative=DRAFTING))
    assert max(shape.num_tokens for shape in shapes) == 512
    assert max(shape.num_rows for shape in shapes if shape.q_len == 1 + K) == 128


@pytest.mark.parametrize(("option", "device", "wanted"), [(True, "cuda", 1), (False, "cuda", 0), (True, "cpu", 0)])
def test_graphs_are_for_cuda_unless_switched_off(option: bool, device: str, wanted: int) -> None:
    assert wants_graphs(EngineConfig(cuda_graphs=option), torch.device(device)) == bool(wanted)


# Padded batches, on a CPU


def padded_cache(**sizes: int) -> KvCache:
    """Sizes as for `PagedBatches`."""
    plan = KvCachePlan(sizes["num_pages"], sizes["page_size"], 16, 64, bytes_per_token=1, has_spare_page=True)
    return allocate_kv_cache(plan, MODEL, sizes["max_num_seqs"], torch.float32, torch.device("cpu"))


def test_a_spare_page_is_in_every_layer_and_in_no_count() -> None:
    cache = padded_cache(num_pages=20, page_size=4, max_num_seqs=5)
    assert {len(layer) for layer in cache.layers} == {21}
    assert (cache.plan.num_pages, cache.plan.num_bytes) == (20, 80)
    assert cache.page_table.shape == (5, 16)
    assert cache.padded_table is not None
    assert cache.padded_table.shape == (6, 16)
    assert cache.padded_table[5].tolist() == [20] * 16
    assert cache.page_table.data_ptr() == cache.padded_table.data_ptr()


@pytest.mark.parametrize("q_len", [1, 3, 9])
def test_padding_rows_lie_in_the_spare_page_behind_the_real_ones(q_len: int) -> None:
    cache = padded_cache(num_pages=20, page_size=4, max_num_seqs=5)
    batches = PagedBatches(num_pages=20, page_size=4, max_num_seqs=5, max_pages=16)
    fixed = FixedBatch(4, q_len, cache)
    places = {name: getattr(fixed.fill(None), name).data_ptr() for name in ("positions", "slot_mapping", "slots")}
    # Fewer rows than before: nothing of the longer batch may stay.
    for slots in ([3, 0, 1, 2], [2, 1]):
        batch = batches.build([BatchRow(slot, 5 + slot, [7] * q_len, True) for slot in slots])
        padded, num_tokens = fixed.fill(batch), batch.num_tokens
        assert padded.num_reqs == 4 and padded.num_tokens == 4 * q_len and padded.max_kv_len == batch.max_kv_len
        for name in ("slots", "kv_len", "paged_kv_last_page_len", "num_computed_tokens"):
            assert torch.equal(getattr(padded, name)[: len(slots)], getattr(batch, name))
        for name in ("positions", "slot_mapping"):
            assert torch.equal(getattr(padded, name)[:num_tokens], getattr(batch, name))
        assert padded.slots[len(slots) :].tolist() == [5] * (4 - len(slots))
        assert padded.kv_len[len(slots) :].tolist() == [q_len] * (4 - len(slots))
        assert (padded.slot_mapping[num_tokens:] // 4 == 20).all()
        pages = padded.paged_kv_indptr.diff()
        assert torch.equal(pages, -(-padded.kv_len // 4))
        assert torch.equal(padded.paged_kv_last_page_len, padded.kv_len - (pages - 1) * 4)
        assert padded.token_reqs.tolist() == [row for row in range(4) for _ in range(q_len)]
        for name, values in padded.host.items():
            assert torch.equal(torch.from_numpy(values), getattr(padded, name)), name
        assert places == {name: getattr(padded, name).data_ptr() for name in places}


def run_steps(runner: ModelRunner) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
    """Logits by slot, and the layers of the cache, after prompts, decodes and verifications of 1 to 5 rows."""
    run = ModelRun(runner)
    run.batches.page_table = runner.page_table
    vocab_size = runner.vocab_size
    run.advance({slot: random_tokens(vocab_size, 9 + 3 * slot, slot) for slot in range(5)})
    for step, (rows, q_len) in enumerate([(3, 1), (5, 1), (1, 1), (3, 1 + K), (5, 1 + K), (2, 1), (1, 1 + K)]):
        slots = range(rows) if step % 2 else range(5 - rows, 5)
        tokens = {slot: random_tokens(vocab_size, q_len, 10 * step + slot) for slot in slots}
        run.advance(tokens, decode=list(slots))
    run.advance({0: random_tokens(vocab_size, 2, 1), 1: random_tokens(vocab_size, 1, 2)}, decode=[0, 1])
    return {slot: run.logits(slot) for slot in range(5)}, runner.kv_cache.layers


@pytest.mark.parametrize("backend", BACKEND_PARAMS)
def test_replays_give_what_eager_passes_give(backend: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_num_seqs": 6, "speculative": DRAFTING}
    eager = load_runner(tiny_folder, backend, **options)
    stand_in = graphs_on_a_cpu(monkeypatch)
    replaying = load_runner(tiny_folder, backend, **options)
    assert eager.graphs is None
    assert stand_in.num_captures == 2 * len(row_buckets(6))
    expected, expected_layers = run_steps(eager)
    logits, layers = run_steps(replaying)
    assert stand_in.num_replays == 7  # neither the prompts, nor the rows of different lengths
    tolerance = 1e-4 if backend == "torch" else 0.0
    for slot, values in expected.items():
        torch.testing.assert_close(logits[slot], values, atol=tolerance, rtol=tolerance)
    for layer, values in zip(layers, expected_layers, strict=True):
        torch.testing.assert_close(layer[:-1], values, atol=tolerance, rtol=tolerance)


def test_outputs_are_the_callers_own(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_a_cpu(monkeypatch)
    runner = load_runner(tiny_folder, "torch")
    batches = PagedBatches(max_num_seqs=40, max_pages=runner.page_table.shape[1])
    batches.page_table = runner.page_table
    first = runner.forward(batches.build([BatchRow(0, 0, [5], True)]))
    kept = first.clone()
    runner.forward(batches.build([BatchRow(1, 0, [9], True)]))
    assert torch.equal(first, kept)


def test_too_little_memory_for_graphs_is_an_error_with_a_way_out(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(function: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs_on_a_cpu(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "CudaCapture", lambda: fail)
    with pytest.raises(ConfigError, match="no memory for CUDA graphs; set cuda_graphs to false"):
        load_runner(tiny_folder, "torch")


# Engines

METHODS = ("none", "ngram", "draft_model", "mtp")


def speculation(method: str, target: Path, tmp_path: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"method": method, "num_speculative_tokens": K}
    if method == "draft_model":
        options["model"] = str(target)
    if method == "mtp":
        options["model"] = str(make_head(target, tmp_path / "head"))
    return options


def run_whole_batches(engine: Engine) -> None:
    """The drafter runs over rejected drafts too, as it does on a device."""
    if hasattr(engine._drafter, "_compacts"):
        engine._drafter._compacts = False


@pytest.mark.parametrize("method", METHODS)
def test_an_engine_that_replays_gives_the_same_tokens(
    method: str, build_tiny: BuildEngine, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = graphs_on_a_cpu(monkeypatch)
    options = {"speculative": speculation(method, tiny_folder, tmp_path), "max_num_seqs": 6}
    eager = build_tiny(**options, cuda_graphs=False)
    assert stand_in.num_captures == 0
    replaying = build_tiny(**options, cuda_graphs=True)
    num_models = 2 if method in ("draft_model", "mtp") else 1
    num_lengths = 1 if method == "none" else 2
    assert stand_in.num_captures == num_models * num_lengths * len(row_buckets(6))
    prompts, params = make_prompts(9), [(GREEDY, SEEDED)[index % 2] for index in range(9)]
    for engine in (eager, replaying):
        run_whole_batches(engine)
    expected = eager.generate(prompts, params)
    assert stand_in.num_replays == 0
    assert ids(replaying.generate(prompts, params)) == ids(expected)
    assert stand_in.num_replays > 20
    assert {engine.stats().num_pages for engine in (eager, replaying)} == {1024}  # the spare one is in no count


# On a GPU

needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
ON_GPU: dict[str, Any] = {"device": "cuda", "page_size": 16, "attention_backend": "flashinfer"}
NEAR_TIE = 0.05  # of log-probabilities: fp16 kernels that add in another order may decide it differently


@pytest.fixture
def wide_folder(tmp_path: Path) -> Path:
    """A random model with heads as FlashInfer takes them."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return make_tiny(
        "smollm",
        tmp_path / "wide",
        tokenizer=True,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )


@pytest.mark.gpu
@needs_flashinfer
def test_captured_passes_give_what_eager_ones_give(wide_folder: Path) -> None:
    options = {**ON_GPU, "max_num_seqs": 6, "speculative": DRAFTING}
    eager = load_runner(wide_folder, "torch", "float16", **options, cuda_graphs=False)
    captured = load_runner(wide_folder, "torch", "float16", **options)
    assert eager.graphs is None
    assert captured.graphs is not None
    expected, _ = run_steps(eager)
    logits, _ = run_steps(captured)
    for slot, values in expected.items():
        torch.testing.assert_close(logits[slot], values, atol=5e-2, rtol=2e-2)


@pytest.mark.gpu
@needs_flashinfer
def test_a_replay_is_the_same_bits_as_its_kernels_one_by_one(
    wide_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**ON_GPU, "max_num_seqs": 6, "speculative": DRAFTING}
    captured, _ = run_steps(load_runner(wide_folder, "torch", "float16", **options))
    stand_in = StandIn()
    monkeypatch.setattr(cuda_graphs, "CudaCapture", lambda: stand_in)
    one_by_one, _ = run_steps(load_runner(wide_folder, "torch", "float16", **options))
    assert stand_in.num_replays == 7
    for slot, values in one_by_one.items():
        assert torch.equal(captured[slot], values)


@pytest.mark.gpu
@needs_flashinfer
@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_an_engine_with_graphs_gives_the_greedy_tokens_of_one_without(
    method: str, build_tiny: BuildEngine, wide_folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        **ON_GPU,
        "model": str(wide_folder),
        "dtype": "float16",
        "batch_invariant": False,
        "max_num_seqs": 6,
        "speculative": speculation(method, wide_folder, tmp_path),
    }
    prompts = make_prompts(9)
    expected = build_tiny(**options, cuda_graphs=False).generate(prompts, GREEDY)
    for ours, theirs in zip(build_tiny(**options).generate(prompts, GREEDY), expected, strict=True):
        assert_equal_up_to_a_near_tie(ours, theirs)


def assert_equal_up_to_a_near_tie(ours: Completion, theirs: Completion) -> None:
    assert ours.logprobs is not None
    for token, other, logprobs in zip(ours.token_ids, theirs.token_ids, ours.logprobs, strict=True):
        if token != other:
            assert logprobs.top_logprobs[0] - logprobs.top_logprobs[1] < NEAR_TIE
            assert other in logprobs.top_ids
            return
