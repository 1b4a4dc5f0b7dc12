"""The whole engine on a tiny model: one text whatever else happens, with and without speculation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BuildEngine
from sonar_engine.engine import Engine
from sonar_engine.errors import InvalidRequestError
from sonar_engine.types import Completion, SamplingParams
from tiny_models import transformers_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def make_prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    """Random prompts of mixed lengths; every third repeats itself, so that n-grams match."""
    rng = np.random.default_rng(seed)
    prompts = []
    for index in range(count):
        length = int(rng.integers(1, longest))
        prompt = rng.integers(3, 320, length).tolist()
        prompts.append((prompt[:7] * 9)[:length] if index % 3 == 0 else prompt)
    return prompts


def ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def test_greedy_tokens_are_those_of_transformers(build_tiny: BuildEngine, tiny_folder: Path) -> None:
    reference = transformers_model(tiny_folder)
    prompts = make_prompts(4)
    for prompt, completion in zip(prompts, build_tiny().generate(prompts, GREEDY), strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 11},
    "seeded with filters": {"temperature": 0.8, "seed": 12, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.0,
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    "bias and bans": {
        "temperature": 1.0,
        "seed": 5,
        "logit_bias": {17: 4.0, 18: -100.0},
        "banned_token_ids": [19, 20],
    },
    "allowed": {"temperature": 1.0, "seed": 6, "allowed_token_ids": [30, 31, 32, 33, 34]},
    "minimum": {"temperature": 0.0, "ignore_eos": False, "min_tokens": 12, "stop_token_ids": list(range(3, 120))},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative": NGRAM},
    "ngram in small chunks": {"speculative": NGRAM, "max_num_batched_tokens": 23},
    "preempted": {"kv_cache_tokens": 300},
    "preempted with ngram": {"kv_cache_tokens": 300, "speculative": NGRAM},
    "planned ahead": {"plan_ahead": True, "speculative": NGRAM},
    "no prefix cache": {"enable_prefix_caching": False},
    "torch": {"attention_backend": "torch", "linear_backend": "torch", "speculative": NGRAM},
}


@pytest.fixture(scope="module")
def plain_results() -> dict[tuple, list[Completion]]:
    """Each setting's completions one request at a time, without speculation."""
    return {}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_of_running_gives_the_plain_tokens(
    build_tiny: BuildEngine, plain_results: dict[tuple, list[Completion]], variant: str
) -> None:
    backend = {key: value for key, value in VARIANTS[variant].items() if key.endswith("_backend")}
    other = build_tiny(**VARIANTS[variant])
    prompts = make_prompts(10)
    for name, setting in SETTINGS.items():
        params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "logprobs": 3, **setting})
        key = (name, *backend.items())
        if key not in plain_results:
            plain = build_tiny(**backend)
            plain_results[key] = [plain.generate([prompt], params)[0] for prompt in prompts]
        alone = plain_results[key]
        for pass_name in ("cold", "warm"):
            crowd = other.generate(prompts, params)
            assert ids(crowd) == ids(alone), (name, pass_name)
            for one, two in zip(alone, crowd, strict=True):
                assert (one.finish_reason, one.stop_reason, one.text) == (two.finish_reason, two.stop_reason, two.text)
                assert _flat(one) == pytest.approx(_flat(two), abs=1e-5), (name, pass_name)
    stats = other.stats()
    if "preempted" in variant:
        assert stats.num_preemptions > 0
    if "speculative" in VARIANTS[variant]:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    if variant != "no prefix cache":
        assert stats.prefix_hits > 0


def _flat(completion: Completion) -> list[float]:
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    return [value for entry in completion.logprobs for value in (entry.logprob, *entry.top_logprobs)]


def test_differently_seeded_requests_in_one_batch_equal_their_runs_alone(build_tiny: BuildEngine) -> None:
    engine = build_tiny(speculative=NGRAM)
    prompt = make_prompts(1)[0]
    each = [
        SamplingParams(seed=1, max_tokens=30, ignore_eos=True),
        SamplingParams(seed=2, max_tokens=30, ignore_eos=True),
        SamplingParams(max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    ]
    together = engine.generate([prompt] * 4, each)
    alone = [engine.generate([prompt], params)[0] for params in each]
    for index in (0, 1, 3):
        assert together[index].token_ids == alone[index].token_ids
    assert together[0].token_ids != together[1].token_ids
    assert together[2].token_ids != alone[2].token_ids


def test_the_context_limit_ends_a_request_exactly_there(build_tiny: BuildEngine) -> None:
    engine = build_tiny(max_model_len=64, speculative=NGRAM)
    prompt = (make_prompts(1)[0] * 9)[:50]
    (completion,) = engine.generate([prompt], SamplingParams(temperature=0.0, ignore_eos=True))
    assert (len(completion.token_ids), completion.finish_reason) == (14, "length")
    (longest,) = engine.generate([prompt + [3] * 13], SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(longest.token_ids) == 1
    with pytest.raises(InvalidRequestError, match="64"):
        engine.generate([prompt + [3] * 14], SamplingParams(temperature=0.0))


def test_a_stop_token_inside_an_accepted_block_ends_it_there(build_tiny: BuildEngine) -> None:
    engine = build_tiny(speculative=NGRAM)
    prompt = [5, 6, 7, 8] * 8
    (free,) = engine.generate([prompt], GREEDY)
    assert free.metrics.speculation.num_accepted_draft_tokens > 0
    for position in range(1, 39):
        stop = free.token_ids[position]
        first = free.token_ids.index(stop)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[stop])
        (stopped,) = engine.generate([prompt], params)
        assert stopped.token_ids == free.token_ids[: first + 1]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
        params = SamplingParams(temperature=0.0, max_tokens=position, ignore_eos=True, stop_token_ids=[stop])
        (short,) = engine.generate([prompt], params)
        assert short.token_ids == free.token_ids[: min(position, first + 1)]
        assert short.finish_reason == ("stop" if first < position else "length")


def test_speculation_can_be_limited_or_refused_per_request(build_tiny: BuildEngine) -> None:
    engine = build_tiny(speculative=NGRAM)
    prompt = [5, 6, 7, 8] * 8
    (full,) = engine.generate([prompt], GREEDY)
    for refused in ({"speculative_enabled": False}, {"num_speculative_tokens": 0}):
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, **refused)  # type: ignore[arg-type]
        (off,) = engine.generate([prompt], params)
        assert off.token_ids == full.token_ids
        assert off.metrics.speculation.num_draft_tokens == 0
    (one,) = engine.generate(
        [prompt], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, num_speculative_tokens=1)
    )
    assert one.token_ids == full.token_ids
    assert 0 < one.metrics.speculation.num_draft_tokens == one.metrics.speculation.num_spec_steps
    assert full.metrics.speculation.num_draft_tokens > full.metrics.speculation.num_spec_steps


def test_sums_over_requests_equal_the_counters(build_tiny: BuildEngine) -> None:
    engine = build_tiny(speculative=NGRAM)
    completions = engine.generate(make_prompts(12), GREEDY)
    stats, each = engine.stats(), [completion.metrics.speculation for completion in completions]
    assert stats.num_draft_tokens == sum(metrics.num_draft_tokens for metrics in each)
    assert stats.num_accepted_tokens == sum(metrics.num_accepted_draft_tokens for metrics in each)
    assert stats.num_drafts == sum(metrics.num_spec_steps for metrics in each)
    assert stats.generation_tokens == sum(len(completion.token_ids) for completion in completions)
    assert sum(stats.accepted_per_pos) == stats.num_accepted_tokens


def test_aborted_requests_end_once_and_hold_nothing(build_tiny: BuildEngine) -> None:
    engine = build_tiny(speculative=NGRAM, max_num_batched_tokens=32)
    rng = np.random.default_rng(3)
    ends: dict[int, list[int]] = {}
    alive: list[int] = []
    for request_id in range(1, 60):
        engine.submit(request_id, make_prompts(1, seed=request_id)[0], GREEDY)
        alive.append(request_id)
        if rng.random() < 0.6:
            _collect_ends(engine, ends)
        if rng.random() < 0.5:
            engine.abort(alive.pop(int(rng.integers(len(alive)))))
    while engine.has_work():
        _collect_ends(engine, ends)
    assert sorted(ends) == list(range(1, 60))
    assert all(len(reasons) == 1 for reasons in ends.values())


def _collect_ends(engine: Engine, ends: dict[int, list[int]]) -> None:
    events = engine.step()
    if events is None:
        return
    finish = np.frombuffer(events.finish, np.int32).tolist()
    for request_id, reason in zip(np.frombuffer(events.request_ids, np.int64).tolist(), finish, strict=True):
        if reason:
            ends.setdefault(request_id, []).append(reason)


def test_submit_and_abort_from_many_threads_disturb_nobody(build_tiny: BuildEngine) -> None:
    engine = build_tiny(speculative=NGRAM)
    expected = ids(engine.generate(make_prompts(8), GREEDY))
    stop = threading.Event()

    def disturb(first_id: int) -> None:
        request_id = first_id
        while not stop.is_set():
            request_id += 1
            engine.submit(request_id, [4, 5, 6] * 5, GREEDY)
            engine.abort(request_id)
            stop.wait(0.001)

    threads = [threading.Thread(target=disturb, args=(base * 1_000_000,)) for base in (1, 2, 3)]
    for thread in threads:
        thread.start()
    try:
        assert ids(engine.generate(make_prompts(8), GREEDY)) == expected
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    while engine.has_work():
        engine.step()


async def test_streams_give_the_same_tokens_and_closing_one_aborts_it(build_tiny: BuildEngine) -> None:
    engine = build_tiny(speculative=NGRAM)
    prompts = make_prompts(6)
    expected = ids(engine.generate(prompts, GREEDY))

    async def collect(prompt: list[int]) -> list[int]:
        return [token async for output in engine.stream(prompt, GREEDY) for token in output.token_ids]

    assert await asyncio.gather(*(collect(prompt) for prompt in prompts)) == expected
    abandoned = engine.stream(prompts[0], SamplingParams(temperature=0.0, ignore_eos=True))
    await anext(abandoned)
    await abandoned.aclose()
    for _ in range(100):
        if not engine.has_work():
            break
        await asyncio.sleep(0.05)
    assert not engine.has_work()


def test_the_probe_advances_an_idle_engine_and_leaves_nothing(build_tiny: BuildEngine) -> None:
    engine = build_tiny()
    before = engine.stats().num_steps
    engine.probe()
    assert engine.stats().num_steps == before + 1
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([-1], "range"), ([320], "range"), ([2**31], "range"), ([2**63], "integer"), ([1] * 256, "256")],
)
def test_a_bad_prompt_is_refused_and_the_engine_lives(build_tiny: BuildEngine, prompt: list[int], message: str) -> None:
    engine = build_tiny()
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate([prompt], GREEDY)
    assert len(engine.generate([[3, 4]], GREEDY)[0].token_ids) == 40
