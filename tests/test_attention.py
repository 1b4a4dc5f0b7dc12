"""Paged attention against a plain softmax over each row, and the choice of its backend."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import BatchRow, PagedBatches
from model_runs import needs_native, torch_threads
from sonar_engine.attention import torch_attention
from sonar_engine.attention.base import Attention
from sonar_engine.attention.select import MixedWindowAttention, choose_backend, select_attention
from sonar_engine.attention.torch_attention import TorchAttention
from sonar_engine.config import EngineConfig
from sonar_engine.errors import ConfigError
from sonar_engine.kv_cache import allocate_kv_cache, bytes_per_token, plan_kv_cache
from sonar_engine.layers.select import select_ops
from sonar_engine.layers.torch_ops import TorchOps
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.step_buffers import BatchMetadata

BuildAttention = Callable[[list[torch.Tensor], float, int | None], Attention]
CPU = torch.device("cpu")

MODEL = ModelConfig(
    family="llama",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: a second thread would cost more than it gives."""
    with torch_threads(1):
        yield


def _torch_plain(caches: list[torch.Tensor], scale: float, window: int | None) -> Attention:
    return TorchAttention(caches, scale, window)


def _torch_invariant(caches: list[torch.Tensor], scale: float, window: int | None) -> Attention:
    return TorchAttention(caches, scale, window, batch_invariant=True)


def _native(caches: list[torch.Tensor], scale: float, window: int | None) -> Attention:
    from sonar_engine.attention.native_attention import NativeAttention

    return NativeAttention(caches, scale, window, torch.get_num_threads())


def _flashinfer(caches: list[torch.Tensor], scale: float, window: int | None) -> Attention:
    from sonar_engine.attention.flashinfer_attention import FlashInferAttention

    return FlashInferAttention(caches, 6, scale, window)


ON_CPU = [
    pytest.param(_torch_plain, id="torch"),
    pytest.param(_torch_invariant, id="torch_invariant"),
    pytest.param(_native, id="native", marks=needs_native),
]


class PlainAttention:
    """Keeps every sequence's keys and values as they come; softmax in float64."""

    def __init__(self, scale: float, window: int | None) -> None:
        self.scale, self.window = scale, window
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def forward(self, batch: BatchMetadata, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outputs = []
        indptr = batch.host["qo_indptr"]
        for row, slot in enumerate(batch.host["slots"].tolist()):
            span, start = slice(indptr[row], indptr[row + 1]), int(batch.host["num_computed_tokens"][row])
            self.keys[slot] = torch.cat([self.keys[slot][:start], k[span]]) if start else k[span]
            self.values[slot] = torch.cat([self.values[slot][:start], v[span]]) if start else v[span]
            outputs.append(self._row(q[span], self.keys[slot], self.values[slot], start))
        return torch.cat(outputs)

    def _row(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
        group = q.shape[1] // keys.shape[1]
        keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * self.scale
        query_at = start + torch.arange(q.shape[0], device=q.device)[:, None]
        key_at = torch.arange(keys.shape[0], device=q.device)
        seen = (key_at <= query_at) & (key_at > query_at - (self.window or 10**9))
        probs = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", probs, values).flatten(1)


# Steps of (slot, number of new tokens, decode row): prompts, chunks beside decodes, verify rows, plain decodes.
STEPS = (
    [(0, 1, False)],
    [(0, 30, False), (1, 7, False), (2, 47, False)],
    [(0, 1, True), (1, 1, True), (2, 21, False), (3, 3, False)],
    [(0, 5, True), (1, 2, True), (2, 1, True), (3, 4, True)],
    [(0, 1, True), (1, 1, True), (2, 1, True), (3, 1, True)],
    [(5, 34, False), (4, 29, False)],
)


def _check(
    build: BuildAttention,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 4,
    device: str = "cpu",
    tolerance: float = 1e-5,
) -> None:
    """Runs STEPS over two layers with random tensors that are strided views of one, as in the model."""
    torch.manual_seed(0)
    batches = PagedBatches(num_pages=300, page_size=page_size, seed=1, device=device)
    shape = (300, 2, page_size, num_kv_heads, head_dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)]
    attention, scale = build(caches, head_dim**-0.5, window), head_dim**-0.5
    plain = [PlainAttention(scale, window) for _ in range(2)]
    computed: dict[int, int] = {}
    for step in STEPS:
        batch = batches.build([BatchRow(s, computed.get(s, 0), [0] * n, decode) for s, n, decode in step])
        attention.begin(batch)
        for layer in range(2):
            qkv = torch.randn(batch.num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
            q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
            got = attention.forward(layer, q, k, v)
            assert got.dtype == dtype
            expected = plain[layer].forward(batch, q, k, v)
            torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
        computed |= {s: computed.get(s, 0) + n for s, n, _ in step}


@pytest.mark.parametrize("build", ON_CPU)
@pytest.mark.parametrize("window", [None, 1, 13])
def test_every_token_attends_to_its_own_row_up_to_itself_within_the_window(
    build: BuildAttention, window: int | None
) -> None:
    _check(build, torch.float32, window=window)


@pytest.mark.parametrize("build", ON_CPU)
@pytest.mark.parametrize(("heads", "head_dim", "page_size"), [((4, 4), 8, 1), ((8, 1), 64, 16), ((9, 3), 40, 5)])
def test_head_groups_head_sizes_and_page_sizes(
    build: BuildAttention, heads: tuple[int, int], head_dim: int, page_size: int
) -> None:
    num_heads, num_kv_heads = heads
    _check(
        build,
        torch.float32,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
    )


@pytest.mark.parametrize("build", ON_CPU)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_half_precision_attention_is_right_within_its_rounding(
    build: BuildAttention, dtype: torch.dtype, tolerance: float
) -> None:
    _check(build, dtype, tolerance=tolerance)


def test_a_batch_cut_into_many_groups_gives_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "_QUERY_BLOCK", 16)
    monkeypatch.setattr(torch_attention, "_MAX_GATHERED_TOKENS", 64)
    _check(_torch_plain, torch.float32)
    _check(_torch_plain, torch.float32, window=13)


def test_a_long_prompt_beside_many_decoding_rows_gathers_no_more_than_its_bound() -> None:
    batches = PagedBatches(num_pages=2000, page_size=4, max_pages=1024)
    batches.build([BatchRow(slot, 0, [0] * 60) for slot in range(30)])
    batch = batches.build([BatchRow(slot, 60, [0], True) for slot in range(30)] + [BatchRow(40, 0, [0] * 2000)])
    attention = TorchAttention([torch.zeros(2000, 2, 4, 2, 8)], 1.0)
    groups = attention._groups(batch)
    assert [tuple(group.tokens.shape) for group in groups] == [(30, 1), (16, 128)]
    assert max(group.keys.numel() for group in groups) <= 32768
    covered = torch.cat([g.tokens.flatten() if g.kept is None else g.tokens.flatten()[g.kept] for g in groups])
    assert torch.equal(covered, torch.arange(batch.num_tokens))


def test_layers_with_and_without_a_window_each_keep_their_own() -> None:
    caches = [torch.zeros(300, 2, 4, 2, 16) for _ in range(2)]
    by_window: dict[int | None, Attention] = {w: TorchAttention(caches, 0.25, w) for w in (None, 5)}
    mixed = MixedWindowAttention(by_window, (None, 5))
    batch = PagedBatches().build([BatchRow(0, 0, [0] * 20)])
    q, k, v = torch.randn(20, 4, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    mixed.begin(batch)
    for layer, window in enumerate((None, 5)):
        expected = PlainAttention(0.25, window).forward(batch, q, k, v)
        torch.testing.assert_close(mixed.forward(layer, q, k, v).double(), expected, atol=1e-5, rtol=1e-5)


def test_forward_before_begin_is_an_error() -> None:
    attention = TorchAttention([torch.zeros(4, 2, 4, 2, 8)], 1.0)
    with pytest.raises(RuntimeError, match="begin"):
        attention.forward(0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))


# Choice of the backend


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_backend": "flashinfer"}, "it runs on CUDA, and the device is cpu"),
        ({"attention_backend": "native", "head_dim": 12}, "head_dim must be a multiple of 8"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    model = replace(MODEL, head_dim=options.pop("head_dim", 16))
    with pytest.raises(ConfigError, match=reason):
        choose_backend(EngineConfig(**options), model, CPU, torch.float32)


def test_auto_falls_back_to_torch_where_the_kernels_do_not_fit() -> None:
    model = replace(MODEL, head_dim=12)
    assert choose_backend(EngineConfig(), model, CPU, torch.float32) == "torch"


@needs_native
def test_auto_prefers_the_native_kernels_on_a_cpu() -> None:
    assert choose_backend(EngineConfig(), MODEL, CPU, torch.float32) == "native"
    assert select_ops(EngineConfig(), CPU)[0] == "native"


def test_flashinfer_is_refused_for_what_it_cannot_keep() -> None:
    cuda, model = torch.device("cuda"), replace(MODEL, head_dim=64)
    asked = EngineConfig(attention_backend="flashinfer")
    with pytest.raises(ConfigError, match="float16 or bfloat16"):
        choose_backend(asked, model, cuda, torch.float32)
    with pytest.raises(ConfigError, match="batch_invariant"):
        choose_backend(asked.model_copy(update={"batch_invariant": True}), model, cuda, torch.bfloat16)
    with pytest.raises(ConfigError, match="linear_backend=native cannot be used"):
        select_ops(EngineConfig(linear_backend="native"), cuda)


def test_models_with_windows_on_some_layers_get_a_backend_a_window() -> None:
    model = replace(MODEL, sliding_window=8, layer_windows=(None, 8))
    engine = EngineConfig(attention_backend="torch", max_num_seqs=2, max_model_len=64)
    cache = allocate_kv_cache(plan_kv_cache(engine, model, 64, torch.float32), model, 2, torch.float32, CPU)
    name, attention = select_attention(engine, model, cache, TorchOps())
    assert name == "torch"
    assert isinstance(attention, MixedWindowAttention)


# The KV cache's size


def test_the_cache_holds_every_sequence_in_full_unless_memory_says_less() -> None:
    engine = EngineConfig(max_num_seqs=3, page_size=16)
    plan = plan_kv_cache(engine, MODEL, 100, torch.float32)
    assert (plan.num_pages, plan.max_pages_per_seq, plan.reserved_len) == (21, 7, 100)
    assert bytes_per_token(MODEL, torch.float32) == 2 * 2 * 2 * 16 * 4
    small = plan_kv_cache(engine.model_copy(update={"kv_cache_gib": 8 * 16 * 512 / 2**30}), MODEL, 100, torch.float32)
    assert small.num_pages == 8
    assert plan_kv_cache(engine.model_copy(update={"kv_cache_tokens": 160}), MODEL, 100, torch.float32).num_pages == 10


def test_drafts_reserve_positions_beyond_the_context() -> None:
    engine = EngineConfig(page_size=16, speculative={"method": "ngram", "num_speculative_tokens": 4})
    assert plan_kv_cache(engine, MODEL, 96, torch.float32).reserved_len == 102


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"kv_cache_tokens": 64}, "raise kv_cache_tokens to 112"),
        ({"kv_cache_gib": 1e-5}, "raise kv_cache_gib to 5.34e-05"),
    ],
)
def test_a_cache_too_small_for_one_sequence_is_refused_with_numbers(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=f"needs 7 pages, and .*{advice}, or lower max_model_len"):
        plan_kv_cache(EngineConfig(**options), MODEL, 100, torch.float32)


def test_the_cache_starts_as_zeros_aligned_to_a_cache_line() -> None:
    plan = plan_kv_cache(EngineConfig(max_num_seqs=2), MODEL, 64, torch.bfloat16)
    cache = allocate_kv_cache(plan, MODEL, 2, torch.bfloat16, CPU)
    assert [tuple(layer.shape) for layer in cache.layers] == [(8, 2, 16, 2, 16)] * 2
    assert all(layer.data_ptr() % 64 == 0 and not layer.any() for layer in cache.layers)
    assert cache.page_table.shape == (2, 4)


# FlashInfer

needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)


@needs_flashinfer
def test_flashinfer_takes_the_arguments_that_we_pass() -> None:
    import flashinfer

    options = {"sm_scale": 1.0, "window_left": -1, "q_data_type": torch.float16, "kv_data_type": torch.float16}
    sizes = (4, 2, 64, 16)
    prefill, decode = flashinfer.BatchPrefillWithPagedKVCacheWrapper, flashinfer.BatchDecodeWithPagedKVCacheWrapper
    inspect.signature(prefill).bind(None, "NHD")
    inspect.signature(decode).bind(None, "NHD", use_tensor_cores=True)
    fixed = dict.fromkeys(
        ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    )
    inspect.signature(prefill).bind(None, "NHD", use_cuda_graph=True, backend="fa2", **fixed)
    fixed = dict.fromkeys(("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"))
    inspect.signature(decode).bind(None, "NHD", use_cuda_graph=True, use_tensor_cores=True, **fixed)
    for wrapper in (prefill, decode):
        inspect.signature(wrapper.reset_workspace_buffer).bind(None, None, None)
        inspect.signature(wrapper.run).bind(None, None, None)
    inspect.signature(prefill.plan).bind(None, None, None, None, None, *sizes, causal=True, **options)
    inspect.signature(decode.plan).bind(None, None, None, None, *sizes, **options)
    inspect.signature(flashinfer.append_paged_kv_cache).bind(*[None] * 8, kv_layout="NHD")


@pytest.mark.gpu
@needs_flashinfer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 13])
def test_flashinfer_attends_as_the_reference_does(dtype: torch.dtype, window: int | None) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    _check(_flashinfer, dtype, window=window, head_dim=64, page_size=16, device="cuda", tolerance=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("build", [_torch_plain, _torch_invariant])
def test_the_reference_runs_on_cuda(build: BuildAttention) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    _check(build, torch.float32, device="cuda", tolerance=1e-3)
