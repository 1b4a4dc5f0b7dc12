"""A draft model beside the target: its keys and values are right after every event, and it changes no token."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BuildEngine
from safetensors.torch import load_file, save_file
from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.drafters.draft_model import DraftModelDrafter
from sonar_engine.drafters.draft_sampler import DraftSampler
from sonar_engine.drafters.draft_source import vocabulary_difference
from sonar_engine.engine import Engine
from sonar_engine.errors import ConfigError, ModelLoadError
from sonar_engine.kv_cache import bytes_per_token
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.registry import resolve_model
from sonar_engine.sampling.state import SamplingState
from sonar_engine.tokenizer import load_tokenizer
from sonar_engine.types import Completion, SamplingParams
from sonar_kernels import gumbel_argmax
from test_engine import SETTINGS, ids, make_prompts
from tiny_models import make_tiny, make_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)
K = 4


@pytest.fixture(scope="module")
def near_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its weights: a draft that is right some of the time."""
    folder = make_tiny("smollm", tmp_path_factory.mktemp("near"), tokenizer=True)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        weights[name] = tensor + 0.02 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of another family and shape, without a tokenizer."""
    return make_tiny("qwen3", tmp_path_factory.mktemp("other"), seed=5, num_hidden_layers=2)


def drafting(model: Path, **fields: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": K, **fields}


def drafter_of(engine: Engine) -> DraftModelDrafter:
    drafter = engine._drafter
    assert isinstance(drafter, DraftModelDrafter)
    return drafter


def assert_all_accepted(completions: Sequence[Completion]) -> None:
    drafted = [completion.metrics.speculation.num_draft_tokens for completion in completions]
    accepted = [completion.metrics.speculation.num_accepted_draft_tokens for completion in completions]
    assert min(drafted) > 0
    assert accepted == drafted


def limit_drafts(engine: Engine, limit: Callable[[int], int]) -> None:
    """Step n of the engine drafts at most `limit(n)` tokens a row, as a policy of draft lengths would have it."""
    drafter, steps = drafter_of(engine), iter(range(1_000_000))
    unlimited = drafter.draft_lens

    def draft_lens() -> np.ndarray:
        lens = unlimited()
        assert lens is not None
        return np.minimum(lens, limit(next(steps))).astype(np.int32)

    drafter.draft_lens = draft_lens  # type: ignore[method-assign]


# The target as its own draft: whatever happens, every draft is accepted.

EVENTS: dict[str, dict[str, Any]] = {
    "one step prompts": {},
    "chunked prompts": {"max_num_batched_tokens": 23},
    "few pages": {"kv_cache_tokens": 300},
    "few pages and chunks": {"kv_cache_tokens": 300, "max_num_batched_tokens": 31},
    "no prefix cache": {"enable_prefix_caching": False},
    "planned ahead": {"plan_ahead": True},
    "torch": {"attention_backend": "torch", "linear_backend": "torch"},
    "wide pages": {"page_size": 16},
}


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "whole blocks"])
@pytest.mark.parametrize("event", EVENTS)
def test_a_perfect_draft_is_always_accepted(
    build_tiny: BuildEngine, tiny_folder: Path, event: str, compact: bool
) -> None:
    engine = build_tiny(speculative=drafting(tiny_folder), **EVENTS[event])
    drafter_of(engine)._compacts = compact
    prompts = make_prompts(10)
    for params in (GREEDY, SEEDED):
        for _ in range(2):  # cold, then with whatever the prefix cache holds
            assert_all_accepted(engine.generate(prompts, params))
    stats = engine.stats()
    assert ("few pages" in event) == (stats.num_preemptions > 0)
    if "few pages" not in event:
        assert (stats.prefix_hits > 0) == (event != "no prefix cache")


def test_a_perfect_draft_gives_k_plus_one_tokens_a_step(build_tiny: BuildEngine, tiny_folder: Path) -> None:
    engine = build_tiny(speculative=drafting(tiny_folder))
    (completion,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True))
    assert completion.metrics.speculation.mean_acceptance_length == K + 1
    assert completion.metrics.speculation.acceptance_histogram == [0, 0, 0, 0, 8]


def test_unseeded_samples_of_a_perfect_draft_are_accepted(build_tiny: BuildEngine, tiny_folder: Path) -> None:
    engine = build_tiny(speculative=drafting(tiny_folder), max_num_batched_tokens=64, kv_cache_tokens=800)
    prompts = make_prompts(16)
    each = [
        SamplingParams(temperature=(0.7, 1.0, 1.3)[index % 3], max_tokens=60, ignore_eos=True) if index % 4 else GREEDY
        for index in range(len(prompts))
    ]
    for _ in range(4):
        engine.generate(prompts, each)
    stats = engine.stats()
    assert stats.num_draft_tokens > 2000
    assert stats.num_accepted_tokens >= 0.999 * stats.num_draft_tokens


def test_requests_that_come_one_after_the_other_do_not_disturb_the_draft(
    build_tiny: BuildEngine, tiny_folder: Path
) -> None:
    engine = build_tiny(speculative=drafting(tiny_folder), max_num_batched_tokens=40)
    for request_id, prompt in enumerate(make_prompts(24), start=1):
        engine.submit(request_id, prompt, GREEDY if request_id % 2 else SEEDED)
        for _ in range(request_id % 4):
            engine.step()
        if request_id % 7 == 0:
            engine.abort(request_id - 3)
    while engine.has_work():
        engine.step()
    stats = engine.stats()
    assert 0 < stats.num_draft_tokens == stats.num_accepted_tokens


def test_pages_of_requests_that_do_not_speculate_are_caught_up_before_drafting(
    build_tiny: BuildEngine, tiny_folder: Path
) -> None:
    engine = build_tiny(speculative=drafting(tiny_folder), max_num_batched_tokens=48)
    prompts = make_prompts(8)
    off = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, speculative_enabled=False)
    plain = engine.generate(prompts, off)
    assert engine.stats().num_draft_tokens == 0
    longer = [prompt + completion.token_ids for prompt, completion in zip(prompts, plain, strict=True)]
    hits = engine.stats().prefix_hits
    mixed = [params for _ in prompts for params in (GREEDY, off)]
    completions = engine.generate([prompt for prompt in longer for _ in range(2)], mixed)
    assert engine.stats().prefix_hits > hits
    assert ids(completions[::2]) == ids(completions[1::2])
    assert_all_accepted(completions[::2])
    assert all(completion.metrics.speculation.num_draft_tokens == 0 for completion in completions[1::2])


def test_a_page_that_is_handed_out_again_is_no_longer_the_drafts(build_tiny: BuildEngine, tiny_folder: Path) -> None:
    engine = build_tiny(speculative=drafting(tiny_folder), kv_cache_tokens=280)
    first, second, third = ([3 + index] * 200 for index in range(3))
    for prompt in (first, second):  # together they fill every page with the draft's entries
        assert_all_accepted(engine.generate([prompt], GREEDY))
    off = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, speculative_enabled=False)
    engine.generate([third], off)  # takes those pages for other content, which the draft does not see
    hits = engine.stats().prefix_hits
    assert_all_accepted(engine.generate([third], GREEDY))
    assert engine.stats().prefix_hits - hits > 150


@pytest.mark.parametrize("period", [2, 5, 9])
def test_draft_lengths_of_three_then_none_then_three_leave_the_draft_caught_up(
    build_tiny: BuildEngine, tiny_folder: Path, period: int
) -> None:
    engine = build_tiny(speculative=drafting(tiny_folder), max_num_batched_tokens=64)
    limit_drafts(engine, lambda step: 3 if step // period % 2 == 0 else 0)
    prompts = make_prompts(12)
    for _ in range(2):
        assert_all_accepted(engine.generate(prompts, GREEDY))


def test_a_long_arrears_is_caught_up_in_passes_of_bounded_size(build_tiny: BuildEngine, tiny_folder: Path) -> None:
    engine = build_tiny(speculative=drafting(tiny_folder), max_num_batched_tokens=16, max_num_seqs=3)
    drafter = drafter_of(engine)
    sizes = []
    forward = drafter._runner.model.forward

    def watched(token_ids: torch.Tensor, batch: Any) -> torch.Tensor:
        sizes.append(len(token_ids))
        return forward(token_ids, batch)

    drafter._runner.model.forward = watched  # type: ignore[method-assign]
    prompts = [[3 + index, *([8, 9, 10] * 50)] for index in range(3)]
    off = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, speculative_enabled=False)
    engine.generate(prompts, off)
    assert sizes == []
    assert_all_accepted(engine.generate(prompts, GREEDY))
    assert 16 < max(sizes) <= 16 + 3 * (K + 1)


def test_a_step_that_fails_leaves_the_draft_right(build_tiny: BuildEngine, tiny_folder: Path) -> None:
    engine = build_tiny(speculative=drafting(tiny_folder), max_num_batched_tokens=32)

    def fail_after(call: Callable[..., Any], period: int) -> Callable[..., Any]:
        calls = iter(range(1_000_000))

        def call_and_fail(*arguments: Any) -> Any:
            result = call(*arguments)
            if next(calls) % period == period - 1:
                raise RuntimeError("as told")
            return result

        return call_and_fail

    verifier = engine._machine.verifier
    verifier.verify = fail_after(verifier.verify, 4)  # type: ignore[method-assign]
    engine._drafter.ingest = fail_after(engine._drafter.ingest, 3)  # type: ignore[method-assign]
    for request_id, prompt in enumerate(make_prompts(9), start=1):
        engine.submit(request_id, prompt, GREEDY)
    failures = 0
    while engine.has_work():
        try:
            engine.step()
        except RuntimeError:
            failures += 1
    stats = engine.stats()
    assert failures > 10
    assert 0 < stats.num_draft_tokens == stats.num_accepted_tokens


def test_the_context_limit_ends_a_drafting_request_exactly_there(build_tiny: BuildEngine, tiny_folder: Path) -> None:
    engine = build_tiny(max_model_len=64, kv_cache_tokens=72, speculative=drafting(tiny_folder))
    for length in range(50, 64):
        prompt = (make_prompts(1)[0] * 9)[:length]
        (completion,) = engine.generate([prompt], SamplingParams(temperature=0.0, ignore_eos=True))
        assert (len(completion.token_ids), completion.finish_reason) == (64 - length, "length")
        speculation = completion.metrics.speculation
        assert speculation.num_accepted_draft_tokens == speculation.num_draft_tokens


# Other drafts: the same tokens, whatever they propose.


@pytest.fixture(scope="module")
def plain_results() -> dict[str, list[Completion]]:
    """Each setting's completions one request at a time, without speculation."""
    return {}


@pytest.fixture(params=["near", "other"])
def draft_folder(request: pytest.FixtureRequest, near_folder: Path, other_folder: Path) -> Path:
    return near_folder if request.param == "near" else other_folder


@pytest.mark.parametrize("options", [{}, {"kv_cache_tokens": 280, "max_num_batched_tokens": 29}], ids=["calm", "tight"])
def test_a_draft_model_changes_no_token_no_text_and_no_logprob(
    build_tiny: BuildEngine,
    near_folder: Path,
    draft_folder: Path,
    plain_results: dict[str, list[Completion]],
    options: dict[str, Any],
) -> None:
    engine = build_tiny(speculative=drafting(draft_folder), **options)
    prompts = make_prompts(8, longest=40)
    for name, setting in SETTINGS.items():
        params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "logprobs": 3, **setting})
        if name not in plain_results:
            plain = build_tiny()
            plain_results[name] = [plain.generate([prompt], params)[0] for prompt in prompts]
        for _ in range(2):
            for one, two in zip(plain_results[name], engine.generate(prompts, params), strict=True):
                assert one.token_ids == two.token_ids, name
                assert (one.finish_reason, one.stop_reason, one.text) == (two.finish_reason, two.stop_reason, two.text)
                assert one.logprobs is not None
                assert two.logprobs is not None
                assert [(e.rank, e.top_ids) for e in one.logprobs] == [(e.rank, e.top_ids) for e in two.logprobs]
                given = [entry.logprob for entry in two.logprobs]
                assert given == pytest.approx([entry.logprob for entry in one.logprobs], abs=1e-5)
    stats = engine.stats()
    assert stats.num_draft_tokens > 0
    assert (stats.num_preemptions > 0) == bool(options)
    if draft_folder == near_folder:
        assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95


def test_a_seeded_draft_shares_the_targets_noise(build_tiny: BuildEngine, near_folder: Path) -> None:
    engine = build_tiny(speculative=drafting(near_folder))
    completions = engine.generate(make_prompts(10), SamplingParams(temperature=1.5, seed=3, max_tokens=60))
    drafted = sum(completion.metrics.speculation.num_draft_tokens for completion in completions)
    accepted = sum(completion.metrics.speculation.num_accepted_draft_tokens for completion in completions)
    assert accepted / drafted > 0.4


def test_unseeded_drafts_draw_fresh_coins_in_every_step() -> None:
    state = SamplingState(1, 64, "cpu", ())
    params = SamplingParams(temperature=1.0)
    state.admit(0, params, np.zeros(0, np.int64), np.zeros(0, np.int64), params_seed=5)
    sampler, logits, slots = DraftSampler(state), torch.zeros(1, 64), np.zeros(1, np.int64)
    drawn = [int(sampler.choose(logits, slots, np.array([at]), step)) for at in range(50) for step in range(K)]
    # The draft for output position p of a step that begins at `at`, once for every `at` that reaches p.
    same_position = [{drawn[at * K + p - at] for at in range(p - K + 1, p + 1)} for p in range(K, 50)]
    assert sum(len(tokens) > 1 for tokens in same_position) > 40
    assert np.bincount(drawn, minlength=64).max() < 15


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("everywhere", [True, False])
def test_logits_that_are_no_numbers_are_drawn_from_as_the_probabilities_say(value: float, everywhere: bool) -> None:
    state = SamplingState(1, 8, "cpu", ())
    state.admit(0, SamplingParams(temperature=0.7), np.zeros(0, np.int64), np.zeros(0, np.int64), params_seed=5)
    logits = torch.full((4000, 8), value) if everywhere else torch.arange(8.0).repeat(4000, 1)
    logits[:, 3] = value
    sampler, slots = DraftSampler(state), np.zeros(4000, np.int64)
    drawn = np.bincount(sampler.choose(logits, slots, np.arange(4000), 0), minlength=8) / 4000
    np.testing.assert_allclose(drawn, sampler.probs(logits[:1], slots[:1])[0], atol=0.04)


def test_a_draft_whose_weights_are_no_numbers_changes_no_law(
    build_tiny: BuildEngine, near_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(near_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    engine, plain = build_tiny(speculative=drafting(folder)), build_tiny()
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    texts = [each.generate([make_prompts(1)[0]] * 60, params) for each in (engine, plain)]
    first, second = (np.bincount([t for text in many for t in text.token_ids], minlength=8) for many in texts)
    assert engine.stats().num_draft_tokens > 0
    assert first[0] < second[0] + 4 * np.sqrt(second[0] + 25)  # id 0 is what no number at all would draw


def test_a_seeded_draft_equals_a_seeded_target_of_the_same_logits() -> None:
    state = SamplingState(2, 64, "cpu", ())
    for slot, params in enumerate((SamplingParams(temperature=0.9, seed=5), SamplingParams(temperature=0.9))):
        state.admit(slot, params, np.zeros(0, np.int64), np.zeros(0, np.int64), params_seed=5)
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).repeat(200, 1)
    sampler, positions = DraftSampler(state), np.arange(200)
    inv_temperature, seed_lo, seed_hi = (
        values[:1].expand(200) for values in (state.inv_temperature, state.seed_lo, state.seed_hi)
    )
    targets = gumbel_argmax(logits, inv_temperature, seed_lo, seed_hi, torch.from_numpy(positions).int())
    seeded = sampler.choose(logits, np.zeros(200, np.int64), positions - 2, 2)
    unseeded = sampler.choose(logits, np.ones(200, np.int64), positions - 2, 2)
    assert torch.equal(seeded, targets)
    assert (unseeded == targets).float().mean() < 0.5


def test_unseeded_requests_in_a_crowd_of_seeded_and_greedy_ones_leave_those_alone(
    build_tiny: BuildEngine, near_folder: Path
) -> None:
    engine, plain = build_tiny(speculative=drafting(near_folder)), build_tiny()
    prompts = make_prompts(12)
    unseeded = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    each = [(GREEDY, SEEDED, unseeded)[index % 3] for index in range(len(prompts))]
    together, alone = engine.generate(prompts, each), plain.generate(prompts, each)
    for index, (one, two) in enumerate(zip(together, alone, strict=True)):
        assert (one.token_ids == two.token_ids) or index % 3 == 2
    assert all(completion.metrics.speculation.num_accepted_draft_tokens > 0 for completion in together[2::3])


# What is refused, and what is counted.


def test_the_drafts_keys_and_values_are_counted_in_the_memory_plan(
    build_tiny: BuildEngine, tiny_folder: Path, other_folder: Path
) -> None:
    target, draft = ModelConfig.load(tiny_folder), ModelConfig.load(other_folder)
    for dtype, of_dtype in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        engine = build_tiny(speculative=drafting(other_folder, dtype=dtype))
        expected = bytes_per_token(target, torch.float32) + bytes_per_token(draft, of_dtype)
        assert engine.kv_cache_bytes == 4096 * expected
        layers = drafter_of(engine)._runner.kv_cache.layers
        assert (len(layers), layers[0].dtype) == (drafter_of(engine).kv_layers, of_dtype)
        completions = engine.generate(make_prompts(3), GREEDY)
        assert ids(completions) == ids(build_tiny().generate(make_prompts(3), GREEDY))


def test_a_draft_of_another_vocabulary_is_refused_with_the_ids_that_differ(
    build_tiny: BuildEngine, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = make_tiny("smollm", tmp_path / "other", tokenizer=True)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|turn|>"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"1 ids differ: 1 \('<\|turn\|>', not '<\|im_start\|>'\)"):
        build_tiny(speculative=drafting(folder))
    shorter = tmp_path / "shorter"
    make_tiny("smollm", shorter)
    make_tokenizer(300).save_pretrained(shorter)
    own, target = (load_tokenizer(resolve_model(str(path))) for path in (shorter, tiny_folder))
    difference = vocabulary_difference(own, target)
    if own.vocab_size < target.vocab_size:
        assert difference is not None
        assert str(own.vocab_size) in difference


def test_a_draft_without_a_tokenizer_must_have_the_targets_width(build_tiny: BuildEngine, tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path / "narrow", vocab_size=300)
    with pytest.raises(ConfigError, match="300 entries, the target's 320"):
        build_tiny(speculative=drafting(folder))


def test_a_draft_with_a_damaged_tokenizer_is_refused(build_tiny: BuildEngine, tmp_path: Path) -> None:
    folder = make_tiny("smollm", tmp_path / "damaged", tokenizer=True)
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is damaged"):
        build_tiny(speculative=drafting(folder))


@pytest.mark.parametrize("width", [310, 336])
def test_heads_that_are_padded_differently_go_together(
    build_tiny: BuildEngine, tiny_folder: Path, tmp_path: Path, width: int
) -> None:
    tokenizer = load_tokenizer(resolve_model(str(tiny_folder)))
    assert tokenizer.vocab_size <= 310
    folder = make_tiny("llama2", tmp_path / "padded", vocab_size=width)
    make_tokenizer(320).save_pretrained(folder)
    engine, plain = build_tiny(speculative=drafting(folder)), build_tiny()
    unseeded = SamplingParams(max_tokens=20, ignore_eos=True)
    assert len(engine.generate([[4, 5]], unseeded)[0].token_ids) == 20
    assert ids(engine.generate(make_prompts(3, longest=20), GREEDY)) == ids(
        plain.generate(make_prompts(3, longest=20), GREEDY)
    )


def test_a_draft_with_too_few_positions_is_refused(build_tiny: BuildEngine, tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path / "short", max_position_embeddings=128)
    with pytest.raises(ConfigError, match="has 128 positions, below max_model_len=256"):
        build_tiny(speculative=drafting(folder))


def test_a_model_and_its_method_go_together() -> None:
    with pytest.raises(ValueError, match="draft_model needs a model"):
        SpeculativeConfig(method="draft_model")
    with pytest.raises(ValueError, match="method ngram has no model"):
        EngineConfig(speculative={"method": "ngram", "model": "x"})  # type: ignore[arg-type]
