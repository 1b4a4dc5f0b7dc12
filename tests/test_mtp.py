"""MTP heads beside the target: keys, values and carried rows are right after every event, and no token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BuildEngine
from head_watch import Texts, Watch, drafter_of, drafting, loaded
from sonar_engine.drafters.mtp_config import HeadNorms
from sonar_engine.engine import Engine
from sonar_engine.types import Completion, SamplingParams
from test_engine import ids, make_prompts
from tiny_heads import WINDOW, make_copied_head, make_head
from tiny_models import transformers_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
UNSEEDED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
ONE_DRAFT = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, num_speculative_tokens=1)
OFF = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, speculative_enabled=False)
TORCH = {"attention_backend": "torch", "linear_backend": "torch"}


def limit_drafts(engine: Engine, limit: Callable[[int], int]) -> None:
    """Step n of the engine drafts at most `limit(n)` tokens a row, as a policy of draft lengths would have it."""
    drafter, steps = drafter_of(engine), iter(range(1_000_000))
    lens = drafter._lens
    drafter.draft_lens = lambda: np.minimum(lens, limit(next(steps))).astype(np.int32)  # type: ignore[method-assign]


def branching_prompts() -> list[list[int]]:
    """Beginnings that are shared up to a page, with different tokens behind it, or the same ones."""
    rng = np.random.default_rng(5)
    trunk, branches = rng.integers(3, 320, 8).tolist(), rng.integers(3, 320, (3, 7)).tolist()
    return [trunk + branch + [index] for branch in branches for index in (40, 41)] + [trunk, trunk[:5]]


def some_map(vocab_size: int = 320, size: int = 100) -> torch.Tensor:
    """Ids in no order."""
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(2))[:size].to(torch.int32)


HEADS: dict[str, dict[str, Any]] = {
    "default": {},
    "two layers": {"num_layers": 2},
    "raw features": {"next_feature": "raw"},
    "no norms": {"norms": HeadNorms(False, False, False, False, False), "fusion_bias": True},
    "fewer ids": {"token_map": some_map()},
}


@pytest.fixture(scope="module")
def head_folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {name: make_head(tiny_folder, folder / name.replace(" ", "_"), **HEADS[name]) for name in HEADS}


# What the head holds after every step, against the head over the whole sequence at once.


EVENTS: dict[str, dict[str, Any]] = {
    "one step prompts": {},
    "chunked prompts": {"max_num_batched_tokens": 23},
    "few pages and chunks": {"kv_cache_tokens": 300, "max_num_batched_tokens": 31},
    "no prefix cache": {"enable_prefix_caching": False},
    "planned ahead": {"plan_ahead": True},
    "torch": TORCH,
    "wide pages": {"page_size": 16},
    "drafts beside prompts": {"max_num_batched_tokens": 40, "drafting": {"speculate_in_mixed_batches": True}},
    "look-ups": {"drafting": {"prompt_lookup": True, "prompt_lookup_min": 1}},
}


def options_of(event: str, head: Path, k: int) -> dict[str, Any]:
    """The engine's options for one of `EVENTS`."""
    return with_head(EVENTS[event], head, k)


def with_head(options: dict[str, Any], head: Path, k: int) -> dict[str, Any]:
    options = dict(options)
    return {"speculative": drafting(head, k, **options.pop("drafting", {})), **options}


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "whole batches"])
@pytest.mark.parametrize("event", EVENTS)
def test_the_head_is_right_after_every_step(
    build_tiny: BuildEngine, tiny_folder: Path, head_folders: dict[str, Path], event: str, compact: bool
) -> None:
    engine = build_tiny(**options_of(event, head_folders["default"], 3))
    drafter_of(engine)._compacts = compact
    watch = Watch(engine)
    prompts = make_prompts(10) + branching_prompts()
    each = [(GREEDY, SEEDED, OFF, UNSEEDED, ONE_DRAFT)[index % 5] for index in range(len(prompts))]
    watch.run(prompts, each)
    watch.run(prompts[::-1], each, gap=1)
    watch.check(*loaded(head_folders["default"], tiny_folder), tiny_folder)
    stats = engine.stats()
    assert stats.num_draft_tokens > 300
    assert ("few pages" in event) == (stats.num_preemptions > 0)
    assert (stats.prefix_hits > 100) == (event != "no prefix cache")


@pytest.mark.parametrize("kind", [name for name in HEADS if name != "default"])
def test_every_kind_of_head_is_right_after_every_step(
    build_tiny: BuildEngine, tiny_folder: Path, head_folders: dict[str, Path], kind: str
) -> None:
    engine = build_tiny(speculative=drafting(head_folders[kind]), max_num_batched_tokens=48)
    watch = Watch(engine)
    prompts = make_prompts(6)
    watch.run(prompts, [(GREEDY, SEEDED, UNSEEDED)[index % 3] for index in range(len(prompts))])
    watch.check(*loaded(head_folders[kind], tiny_folder), tiny_folder)
    assert engine.stats().num_draft_tokens > 100


@pytest.mark.parametrize("period", [1, 4])
def test_draft_lengths_of_three_then_none_then_three_leave_the_head_right(
    build_tiny: BuildEngine, tiny_folder: Path, head_folders: dict[str, Path], period: int
) -> None:
    engine = build_tiny(speculative=drafting(head_folders["default"]), max_num_batched_tokens=64)
    limit_drafts(engine, lambda step: 3 if step // period % 2 == 0 else 0)
    watch = Watch(engine)
    watch.run(make_prompts(8), [GREEDY, SEEDED] * 4, gap=1)
    watch.check(*loaded(head_folders["default"], tiny_folder), tiny_folder)
    assert engine.stats().num_draft_tokens > 50


# The same tokens, whatever the head proposes.


@pytest.fixture(scope="module")
def plain_results() -> dict[str, list[Completion]]:
    """Each setting's completions one request at a time, without speculation."""
    return {}


VARIANTS: dict[str, dict[str, Any]] = {
    "calm": {},
    "chunks": {"max_num_batched_tokens": 23},
    "preempted": {"kv_cache_tokens": 300},
    "torch": TORCH,
    "look-ups": {"drafting": {"prompt_lookup": True, "prompt_lookup_min": 1}},
}


@pytest.mark.parametrize("kind", ["default", "fewer ids"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_changes_no_token(  # noqa: PLR0917
    build_tiny: BuildEngine,
    head_folders: dict[str, Path],
    plain_results: dict[str, list[Completion]],
    kind: str,
    k: int,
    variant: str,
) -> None:
    engine = build_tiny(**with_head(VARIANTS[variant], head_folders[kind], k))
    prompts = make_prompts(16)
    for name, params in (("greedy", GREEDY), ("seeded", SEEDED)):
        key = f"{name} {'torch' if variant == 'torch' else 'native'}"
        if key not in plain_results:
            plain = build_tiny(**(TORCH if variant == "torch" else {}))
            plain_results[key] = [plain.generate([prompt], params)[0] for prompt in prompts]
        expected = ids(plain_results[key])
        for _ in range(2):  # cold, then with whatever the prefix cache holds
            assert ids(engine.generate(prompts, params)) == expected
        staggered = Texts(engine)
        staggered.run(prompts, [params] * len(prompts), gap=1)
        texts = staggered.texts.values()
        assert [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)] == expected
        assert [engine.generate([prompt], params)[0].token_ids for prompt in prompts[:4]] == expected[:4]
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert (stats.num_preemptions > 0) == (variant == "preempted")


def test_rows_whose_last_tokens_occurred_before_draft_what_followed_them(
    build_tiny: BuildEngine, head_folders: dict[str, Path]
) -> None:
    """Whatever the head, a text that goes round is drafted right; a row beside it with nothing to look up is too."""
    lookup = {"prompt_lookup": True, "prompt_lookup_min": 4}
    engines = [build_tiny(speculative=drafting(head_folders["fewer ids"], 3, **options)) for options in ({}, lookup)]
    round_text = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    alone, looked_up = ([engine.generate([prompt], round_text)[0] for prompt in make_prompts(4)] for engine in engines)
    assert ids(alone) == ids(looked_up)
    drafted, accepted = (
        [sum(getattr(each.metrics.speculation, name) for each in some) for some in (alone, looked_up)]
        for name in ("num_draft_tokens", "num_accepted_draft_tokens")
    )
    assert accepted[1] / drafted[1] > 2 * accepted[0] / drafted[0]


# A head that always predicts right: a target of one windowed layer and a copy of that layer as the head.


@pytest.fixture(scope="module")
def perfect(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_copied_head(tmp_path_factory.mktemp("perfect"))


def long_prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, 320, WINDOW + 1 + int(rng.integers(40))).tolist() for _ in range(count)]


def assert_all_accepted(completions: Sequence[Completion]) -> None:
    drafted = [completion.metrics.speculation.num_draft_tokens for completion in completions]
    accepted = [completion.metrics.speculation.num_accepted_draft_tokens for completion in completions]
    assert min(drafted) > 0
    assert accepted == drafted


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "whole batches"])
@pytest.mark.parametrize("event", [event for event in EVENTS if event != "look-ups"])
def test_a_perfect_head_is_always_accepted(
    build_tiny: BuildEngine, perfect: tuple[Path, Path], event: str, compact: bool
) -> None:
    target, head = perfect
    engine = build_tiny(model=str(target), **options_of(event, head, 4))
    drafter_of(engine)._compacts = compact
    prompts = long_prompts(8) + [[*prompt, 41] for prompt in long_prompts(4)]
    for params in (GREEDY, SEEDED):
        for _ in range(2):
            assert_all_accepted(engine.generate(prompts, params))
    assert ("few pages" in event) == (engine.stats().num_preemptions > 0)


def test_a_perfect_head_gives_k_plus_one_tokens_a_step(build_tiny: BuildEngine, perfect: tuple[Path, Path]) -> None:
    target, head = perfect
    engine = build_tiny(model=str(target), speculative=drafting(head, 4))
    params = SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True)
    (completion,) = engine.generate(long_prompts(1), params)
    assert completion.metrics.speculation.mean_acceptance_length == 5


def test_ids_of_its_own_do_not_keep_a_perfect_head_from_being_accepted(build_tiny: BuildEngine, tmp_path: Path) -> None:
    """Also where seeded drafts take the target's noise, which belongs to the target's ids."""
    token_map = some_map(size=320)
    target, head = make_copied_head(tmp_path, token_map=token_map)
    engine = build_tiny(model=str(target), speculative=drafting(head, 4))
    assert torch.equal(drafter_of(engine)._token_map, token_map)  # type: ignore[arg-type]
    prompts = long_prompts(12)
    each = [(GREEDY, SEEDED)[index % 2] for index in range(len(prompts))]
    assert_all_accepted(engine.generate(prompts, each))
    engine.generate(prompts, UNSEEDED)
    stats = engine.stats()
    assert stats.num_accepted_tokens >= 0.995 * stats.num_draft_tokens


def test_a_step_that_fails_leaves_the_head_right(build_tiny: BuildEngine, perfect: tuple[Path, Path]) -> None:
    """Before `ingest` nothing has changed; behind it the next draft may be poor, once."""
    target, head = perfect
    engine = build_tiny(model=str(target), speculative=drafting(head, 4), max_num_batched_tokens=32)
    verifier = engine._machine.verifier
    verify, calls = verifier.verify, iter(range(1_000_000))

    def verify_and_fail(*arguments: Any) -> Any:
        result = verify(*arguments)
        if next(calls) % 3 == 2:
            raise RuntimeError("as told")
        return result

    verifier.verify = verify_and_fail  # type: ignore[method-assign]
    for request_id, prompt in enumerate(long_prompts(9), start=1):
        engine.submit(request_id, prompt, GREEDY)
    failures = 0
    while engine.has_work():
        try:
            engine.step()
        except RuntimeError:
            failures += 1
    stats = engine.stats()
    assert failures > 5
    assert 0 < stats.num_draft_tokens == stats.num_accepted_tokens


# The law of unseeded requests.


@pytest.mark.parametrize("lookup", [{}, {"prompt_lookup": True, "prompt_lookup_min": 1}], ids=["head", "look-ups"])
@pytest.mark.parametrize("token_map", [None, torch.tensor([6, 1, 0, 7, 3], dtype=torch.int32)], ids=["all", "some"])
def test_unseeded_drafts_of_a_head_leave_the_targets_law(
    build_tiny: BuildEngine,
    tiny_folder: Path,
    tmp_path: Path,
    token_map: torch.Tensor | None,
    lookup: dict[str, Any],
) -> None:
    """The first three tokens of 8 ids, two of them drafted, against the target's own probabilities, by chi-square."""
    target, head = make_copied_head(tmp_path, token_map=token_map, noise=0.4, vocab_size=8)
    engine = build_tiny(
        model=str(target),
        tokenizer=str(tiny_folder),
        speculative=drafting(head, **lookup),
        max_num_seqs=128,
        max_num_batched_tokens=2048,
    )
    params = SamplingParams(temperature=2.0, max_tokens=5, ignore_eos=True)
    num_runs, prompt = 12_800, [3, 1, 4, 1, 5, 2, 6, 5]
    texts = np.array([tokens for _ in range(100) for tokens in ids(engine.generate([prompt] * 128, params))])
    counts = np.bincount(texts[:, 0] * 64 + texts[:, 1] * 8 + texts[:, 2], minlength=512)
    expected = num_runs * law_of_three_tokens(target, prompt, params.temperature)
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    assert len(counts) > 50
    deviation = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    assert deviation < freedom + 3.3 * (2 * freedom) ** 0.5
    stats = engine.stats()
    assert stats.num_draft_tokens > 3 * num_runs
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9


def law_of_three_tokens(target: Path, prompt: list[int], temperature: float) -> np.ndarray:
    """float64 [512]: the probability of tokens (a, b, c) at 64 a + 8 b + c."""
    reference = transformers_model(target)
    grid = torch.cartesian_prod(*[torch.arange(8)] * 3)
    rows = torch.cat((torch.tensor(prompt).expand(512, -1), grid), dim=1)
    log_probs = (reference(rows).logits[:, len(prompt) - 1 : -1].double() / temperature).log_softmax(dim=2)
    return log_probs.gather(2, grid[:, :, None]).sum(dim=(1, 2)).exp().numpy()
