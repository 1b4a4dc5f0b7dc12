"""Faults that other engines were reported to have, where no other file here covers the kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BuildEngine
from msgspec.structs import replace
from sonar_engine.engine import Engine
from sonar_engine.types import Completion, SamplingParams
from test_engine import NGRAM, ids, make_prompts
from test_oracle import oracle, write_texts
from tiny_heads import make_head
from toy_target import ToyLoop

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
METHODS = ("ngram", "oracle", "draft_model", "mtp")
Speculative = Callable[..., dict[str, Any]]


@pytest.fixture
def speculative(tiny_folder: Path, tmp_path: Path) -> Speculative:
    """The configuration of a way of drafting; the oracle's texts are `plain`, right two times out of three."""

    def configure(method: str, plain: list[Completion], rate: float = 0.66) -> dict[str, Any]:
        if method == "ngram":
            return NGRAM
        if method == "oracle":
            return oracle(write_texts(tmp_path / "texts", plain), [rate])
        if method == "draft_model":
            return {"method": "draft_model", "model": str(tiny_folder), "num_speculative_tokens": 4}
        return {"method": "mtp", "model": str(make_head(tiny_folder, tmp_path / "head")), "num_speculative_tokens": 3}

    return configure


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 1.5}, {"presence_penalty": -1.0}, {"repetition_penalty": 1.3}, {"repetition_penalty": 0.8}],
    ids=lambda penalty: " ".join(f"{name} {value}" for name, value in penalty.items()),
)
def test_greedy_tokens_under_any_penalty_are_those_without_speculation(
    build_tiny: BuildEngine, speculative: Speculative, method: str, penalty: dict[str, float]
) -> None:
    prompts, params = make_prompts(6), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, **penalty)  # type: ignore[arg-type]
    plain = build_tiny().generate(prompts, params)
    engine = build_tiny(speculative=speculative(method, plain))
    assert ids(engine.generate(prompts, params)) == ids(plain)
    assert engine.stats().num_draft_tokens > 0
    # Beside requests without penalties as well.
    each = [params if index % 2 else GREEDY for index in range(len(prompts))]
    mixed = engine.generate(prompts, each)
    assert ids(mixed)[1::2] == ids(plain)[1::2]


def test_an_eos_inside_an_accepted_block_ends_text_and_stream_there_unless_it_is_ignored(
    build_tiny: BuildEngine, tmp_path: Path
) -> None:
    """At every place that an EOS can have in a block."""
    prompts = make_prompts(12)
    ignoring = replace(GREEDY, temperature=1.0, seed=3, allowed_token_ids=[2, *range(40, 60)])
    free = build_tiny().generate(prompts, ignoring)
    engine = build_tiny(speculative=oracle(write_texts(tmp_path / "texts", free), [1.0]))
    again = engine.generate(prompts, ignoring)
    assert ids(again) == ids(free)
    places = set()
    streamed: dict[int, str] = {}

    def on_text(index: int, text: str) -> None:
        streamed[index] = streamed.get(index, "") + text

    ended = engine.generate(prompts, replace(ignoring, ignore_eos=False), on_text)
    for completion, whole in zip(ended, free, strict=True):
        length = whole.token_ids.index(2) + 1 if 2 in whole.token_ids else len(whole.token_ids)
        assert completion.token_ids == whole.token_ids[:length]
        assert completion.finish_reason == ("stop" if 2 in whole.token_ids else "length")
        assert (
            streamed.get(completion.index, "")
            == completion.text
            == engine.tokenizer.decode(whole.token_ids[:length], skip_special_tokens=True)
        )
        places.add((length - 2) % 5 if 2 in whole.token_ids else None)
    assert len(places - {None}) >= 3


def test_bias_bans_and_min_p_reach_every_verified_position() -> None:
    """Drafts that only an unprocessed row would take are rejected wherever in the chain they stand."""
    table = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).expand(4, 4).contiguous()
    settings = [
        SamplingParams(temperature=0.0, logit_bias={1: -100.0}),
        SamplingParams(temperature=0.0, banned_token_ids=[1]),
        SamplingParams(temperature=0.0, allowed_token_ids=[0, 2, 3]),
        SamplingParams(temperature=0.0, logit_bias={2: 5.0}),
    ]
    for wrong_at in range(4):
        loop = ToyLoop(table, settings)
        draft = [2] * wrong_at + [1] + [2] * (3 - wrong_at)
        loop.step(range(len(settings)), [draft] * len(settings))
        assert loop.outputs == [[2] * (wrong_at + 1)] * len(settings)
    # With min-p 0.5 only token 1 is left (token 2 has 0.37 of its probability), at any seed and position.
    narrow = [SamplingParams(temperature=1.0, min_p=0.5, seed=seed) for seed in range(20)]
    loop = ToyLoop(table, narrow)
    loop.step(range(20), [[1, 1, 2, 1]] * 20)
    assert loop.outputs == [[1, 1, 1]] * 20


@pytest.mark.parametrize("method", METHODS)
def test_a_preempted_request_that_returns_in_a_step_without_drafting_sees_no_stale_drafts(
    build_tiny: BuildEngine, speculative: Speculative, method: str
) -> None:
    prompts = make_prompts(10, longest=40)
    plain = build_tiny().generate(prompts, GREEDY)
    engine = build_tiny(
        speculative=speculative(method, plain), kv_cache_tokens=300, max_num_batched_tokens=29, max_num_seqs=8
    )
    drafter, steps = engine._drafter, iter(range(1_000_000))
    unlimited = drafter.draft_lens

    def every_other_step() -> np.ndarray | None:
        lens = unlimited()
        return lens if next(steps) % 2 == 0 else None

    drafter.draft_lens = every_other_step  # type: ignore[method-assign]
    for _ in range(2):
        assert ids(engine.generate(prompts, GREEDY)) == ids(plain)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_draft_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_follow_up_prompt_over_pages_that_held_rejected_drafts_has_the_log_probabilities_of_a_cold_one(
    build_tiny: BuildEngine, speculative: Speculative, method: str
) -> None:
    prompts = make_prompts(8)
    sampled = replace(GREEDY, temperature=1.0, seed=9)  # so that every way of drafting is wrong now and then
    plain = build_tiny().generate(prompts, sampled)
    drafting = speculative(method, plain, rate=0.4)
    if method == "draft_model":
        drafting = {**drafting, "dtype": "bfloat16"}
    engine = build_tiny(speculative=drafting)
    first = engine.generate(prompts, sampled)
    assert ids(first) == ids(plain)
    stats = engine.stats()
    if method != "draft_model":
        assert stats.num_accepted_tokens < stats.num_draft_tokens
    follow_up = [prompt + completion.token_ids + [5] for prompt, completion in zip(prompts, first, strict=True)]
    params = replace(GREEDY, max_tokens=12, logprobs=5)
    warm = engine.generate(follow_up, params)
    assert engine.stats().prefix_hits - stats.prefix_hits > sum(map(len, follow_up)) // 2
    cold = build_tiny().generate(follow_up, params)
    for one, two in zip(cold, warm, strict=True):
        assert one.token_ids == two.token_ids
        assert one.logprobs is not None
        assert two.logprobs is not None
        assert [e.top_logprobs for e in one.logprobs] == [e.top_logprobs for e in two.logprobs]


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("method", METHODS)
def test_every_page_is_free_again_once_requests_have_ended_or_were_aborted(
    build_tiny: BuildEngine, speculative: Speculative, method: str, page_size: int
) -> None:
    prompts = make_prompts(10)
    plain = build_tiny().generate(prompts, GREEDY)
    engine = build_tiny(speculative=speculative(method, plain), page_size=page_size, enable_prefix_caching=False)
    total = engine.stats().num_free_pages
    assert total == engine.stats().num_pages
    for aborted_after in (1, 2, 5, 9):
        run_and_abort_half(engine, prompts, aborted_after)
        assert engine.stats().num_free_pages == total
    engine.check_integrity()


def run_and_abort_half(engine: Engine, prompts: list[list[int]], aborted_after: int) -> None:
    """Aborts every other request after so many steps."""
    for request_id, prompt in enumerate(prompts, start=1):
        engine.submit(request_id, prompt, GREEDY)
    for _ in range(aborted_after):
        engine.step()
    for request_id in range(1, len(prompts) + 1, 2):
        engine.abort(request_id)
    while engine.has_work():
        engine.step()
