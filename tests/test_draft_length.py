"""Adaptive draft lengths: the same text, fewer drafts where they do not pay, and room given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import BuildEngine
from head_watch import drafting as head_drafting
from sonar_engine._scheduler import Scheduler
from sonar_engine.config import SpeculativeConfig
from sonar_engine.engine import Engine
from sonar_engine.errors import ConfigError
from sonar_engine.types import SamplingParams
from test_engine import ids, make_prompts
from test_oracle import oracle, write_texts
from tiny_heads import make_head

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=48, ignore_eos=True)
K = 3
# A step of one length costs what the test says, whatever the clock says.
CHEAP_DRAFTS = [(rows, length, 1.0 + 0.001 * length) for rows in (1, 16) for length in (0, K)]
DEAR_DRAFTS = [(rows, length, 1.0 + 5.0 * length) for rows in (1, 16) for length in (0, K)]


def options_of(method: str, tiny_folder: Path, tmp_path: Path) -> dict[str, Any]:
    if method == "mtp":
        return head_drafting(make_head(tiny_folder, tmp_path / "head"), K)
    model = {"model": str(tiny_folder)} if method == "draft_model" else {}
    return {"method": method, "num_speculative_tokens": K, **model}


def without_clock(engine: Engine, points: Sequence[tuple[int, int, float]]) -> None:
    """The policy knows `points` and learns nothing about costs."""
    engine._scheduler.adapt_draft_length(points)
    engine._statistics.end_step = lambda: None  # type: ignore[method-assign]


def watch_drafts(engine: Engine) -> list[int]:
    """A list to which every step of decode rows adds the most drafts of a row."""
    most: list[int] = []
    propose = engine._drafter.propose

    def watching(batch: Any) -> Any:
        if batch.num_decode_reqs == batch.num_reqs:
            most.append(batch.max_draft_tokens)
        return propose(batch)

    engine._drafter.propose = watching  # type: ignore[method-assign]
    return most


@pytest.mark.parametrize("method", ["ngram", "draft_model", "mtp"])
def test_an_adaptive_length_changes_no_token(
    build_tiny: BuildEngine, tiny_folder: Path, tmp_path: Path, method: str
) -> None:
    prompts = make_prompts(8)
    off = build_tiny()
    on = build_tiny(speculative={**options_of(method, tiny_folder, tmp_path), "draft_length": "adaptive"})
    for params in (GREEDY, SEEDED):
        for _ in range(2):
            assert ids(on.generate(prompts, params)) == ids(off.generate(prompts, params))
    assert 0 <= on.stats().draft_length <= K


def test_measuring_costs_leaves_no_trace(build_tiny: BuildEngine, tiny_folder: Path, tmp_path: Path) -> None:
    for method in ("ngram", "draft_model", "mtp"):
        engine = build_tiny(
            speculative={**options_of(method, tiny_folder, tmp_path / method), "draft_length": "adaptive"}
        )
        stats = engine.stats()
        assert not engine.has_work()
        assert stats.num_free_pages == stats.num_pages
        assert (stats.num_steps, stats.prefix_queries, stats.num_preemptions, stats.generation_tokens) == (0, 0, 0, 0)
        assert engine._params == {}


@pytest.mark.parametrize(
    "limits",
    [
        {"max_model_len": 2, "kv_cache_tokens": 64},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 2, "max_num_seqs": 2},
        {"kv_cache_tokens": 264},
        {"max_waiting": 1},
    ],
    ids=str,
)
def test_adapting_starts_in_an_engine_of_any_size(build_tiny: BuildEngine, limits: dict[str, Any]) -> None:
    adaptive = {"method": "ngram", "num_speculative_tokens": 1, "draft_length": "adaptive"}
    engine = build_tiny(speculative=adaptive, **limits)
    params = SamplingParams(temperature=0.0, max_tokens=1 if "max_model_len" in limits else 30, ignore_eos=True)
    assert ids(engine.generate([[5]], params)) == ids(build_tiny(**limits).generate([[5]], params))


@pytest.mark.parametrize("method", ["draft_model", "mtp", "ngram"])
def test_drafting_stops_where_it_costs_more_than_it_brings(
    build_tiny: BuildEngine, tiny_folder: Path, tmp_path: Path, method: str
) -> None:
    engine = build_tiny(speculative={**options_of(method, tiny_folder, tmp_path), "draft_length": "adaptive"})
    drafts = watch_drafts(engine)
    without_clock(engine, DEAR_DRAFTS)
    engine.generate(make_prompts(4), GREEDY)
    assert engine.stats().draft_length == 0
    assert sum(drafts) == 0
    without_clock(engine, CHEAP_DRAFTS)
    engine.generate([[5, 6, 7] * 6], GREEDY)
    assert sum(drafts) > 0


def test_a_fixed_length_stays(build_tiny: BuildEngine, tiny_folder: Path, tmp_path: Path) -> None:
    engine = build_tiny(speculative={**options_of("draft_model", tiny_folder, tmp_path), "draft_length": "fixed"})
    drafts = watch_drafts(engine)
    engine.generate([[5, 6, 7]], GREEDY)
    assert engine.stats().draft_length == K
    assert set(drafts[:-1]) <= {K, K - 1, K - 2}
    assert drafts[0] == K


def force_lengths(engine: Engine, lengths: Callable[[int], int]) -> list[int]:
    """Step n drafts `lengths(n)` tokens a row at most; a list of what the steps drafted."""
    drafter, steps = engine._drafter, iter(range(1_000_000))
    unlimited = drafter.draft_lens

    def draft_lens() -> np.ndarray:
        lens = unlimited()
        assert lens is not None
        return np.minimum(lens, lengths(next(steps))).astype(np.int32)

    drafts = watch_drafts(engine)
    drafter.draft_lens = draft_lens  # type: ignore[method-assign]
    return drafts


@pytest.mark.parametrize("ahead", [False, True], ids=["planned at once", "planned ahead"])
@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_the_draft_is_caught_up_when_the_length_goes_3_0_3(
    build_tiny: BuildEngine, tiny_folder: Path, tmp_path: Path, method: str, ahead: bool
) -> None:
    """What is accepted after steps without drafts is what is accepted at the same places with none left out."""
    options = options_of(method, tiny_folder, tmp_path)
    prompts = make_prompts(6)
    switching = build_tiny(speculative=options, plan_ahead=ahead)
    drafts = force_lengths(switching, lambda step: K if step // 5 % 2 == 0 else 0)
    assert ids(switching.generate(prompts, GREEDY)) == ids(build_tiny().generate(prompts, GREEDY))
    assert drafts.count(0) >= 5 and drafts.count(K) >= 5
    if method == "draft_model":  # the target is its own draft
        stats = switching.stats()
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


def scheduler_with(num_pages: int, points: Sequence[tuple[int, int, float]]) -> Scheduler:
    scheduler = Scheduler(
        page_size=2,
        num_pages=num_pages,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=32,
        vocab_size=100,
        max_waiting=8,
        enable_prefix_caching=False,
        num_speculative_tokens=6,
        eos_token_ids=np.array([], np.int32),
        cache_key=bytes(32),
    )
    if points:
        scheduler.adapt_draft_length(points)
    return scheduler


def pages_in_flight(scheduler: Scheduler, num_requests: int) -> list[int]:
    """Pages that are taken while each of 6 decode steps is in flight; every draft is rejected."""
    for request_id in range(num_requests):
        scheduler.submit(request_id, np.arange(1, 6, dtype=np.int32), max_tokens=20, ignore_eos=True)
    lens, taken = np.full(4, 6, np.int32), []
    for step in range(7):
        step_id = scheduler.plan(step % 2, lens)
        assert step_id is not None
        stats = scheduler.stats()
        taken.append(stats.num_pages - stats.num_free_pages)
        scheduler.commit(step_id, np.ones(num_requests, np.int32), np.full((num_requests, 1), 7, np.int32))
        scheduler.check_integrity()
    return taken[1:]


def test_pages_are_taken_for_the_length_in_use_and_no_longer_one() -> None:
    dear = [(rows, length, 1.0 + 9.0 * length) for rows in (1, 4) for length in (0, 6)]
    fair = [(rows, length, 1.0 + 0.15 * length) for rows in (1, 4) for length in (0, 6)]
    none, adapted, most = (pages_in_flight(scheduler_with(64, points), 4) for points in (dear, fair, []))
    # Without drafts: the tokens so far, the next one, and one that a drafter writes beyond it.
    assert none == [4 * -(-(6 + step + 1) // 2) for step in range(6)]
    assert all(few < many for few, many in zip(none, most, strict=True))
    # It begins with drafts; when none has been accepted it stops, and their pages are free again.
    assert none[0] < adapted[0] <= most[0]
    assert adapted[-2:] == none[-2:]


def test_wrong_measurements_are_refused() -> None:
    with pytest.raises(ConfigError, match="measured with one draft length; measure at least two"):
        scheduler_with(64, [(1, 0, 1.0)])
    with pytest.raises(ConfigError, match="positive time"):
        scheduler_with(64, [(1, 0, 0.0), (1, 1, 1.0)])


def test_a_draft_length_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fixed.*adaptive"):
        SpeculativeConfig(method="ngram", draft_length="auto")  # type: ignore[arg-type]


def test_the_oracle_adapts_to_its_rate(build_tiny: BuildEngine, tmp_path: Path) -> None:
    prompts = make_prompts(4)
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    plain = build_tiny().generate(prompts, params)
    points = [(rows, length, 1.0 + 0.3 * length) for rows in (1, 16) for length in (0, K)]
    for rate, lengths in ((0.0, {0}), (1.0, {K})):
        speculative = {**oracle(write_texts(tmp_path / "texts", plain), [rate], K), "draft_length": "adaptive"}
        engine = build_tiny(speculative=speculative)
        without_clock(engine, points)
        assert ids(engine.generate(prompts, params)) == ids(plain)
        assert engine.stats().draft_length in lengths
