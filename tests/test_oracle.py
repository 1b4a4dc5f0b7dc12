"""The oracle drafter: the acceptance it is asked for, and the same tokens whatever it proposes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BuildEngine
from sonar_engine.config import SpeculativeConfig
from sonar_engine.drafters.oracle import OracleDrafter
from sonar_engine.engine import Engine
from sonar_engine.errors import ConfigError
from sonar_engine.types import Completion, SamplingParams
from test_engine import SETTINGS, ids, make_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True)
K = 4
TIGHT = {"kv_cache_tokens": 300, "max_num_batched_tokens": 29}


def write_texts(file: Path, completions: Sequence[Completion]) -> Path:
    lines = [json.dumps({"prompt_token_ids": c.prompt_token_ids, "token_ids": c.token_ids}) for c in completions]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def oracle(texts: Path, rates: Sequence[float], k: int = K) -> dict[str, Any]:
    return {"method": "oracle", "oracle_texts": str(texts), "oracle_rates": list(rates), "num_speculative_tokens": k}


def accepted_in_each_step(engine: Engine, slot: int, rates: Sequence[float], num_tokens: int) -> list[int]:
    """What a request alone in `slot` accepts, by the coins: the first token comes from the prompt's own pass."""
    drafter = engine._drafter
    assert isinstance(drafter, OracleDrafter)
    places = torch.arange(num_tokens, dtype=torch.int32)[None]
    coins = drafter.coins(torch.tensor([slot]), places)[0].tolist()
    place, accepted = 1, []
    while place < num_tokens:
        num_drafts = min(K, num_tokens - place - 1)
        right = [coins[place + j] < rates[min(j, len(rates) - 1)] for j in range(num_drafts)]
        accepted.append(([*right, False]).index(False))
        place += accepted[-1] + 1
    return accepted


@pytest.mark.parametrize("options", [{}, TIGHT], ids=["calm", "tight"])
@pytest.mark.parametrize("rates", [(0.0,), (0.5,), (1.0,), (0.9, 0.6, 0.2)], ids=str)
def test_every_step_accepts_what_the_rates_and_the_coins_say(
    build_tiny: BuildEngine, tmp_path: Path, rates: tuple[float, ...], options: dict[str, Any]
) -> None:
    prompts = make_prompts(10, longest=40)
    plain = build_tiny().generate(prompts, GREEDY)
    engine = build_tiny(speculative=oracle(write_texts(tmp_path / "texts", plain), rates), **options)
    slots: list[int] = []
    admit = engine._drafter.admit
    engine._drafter.admit = lambda slot, *others: (slots.append(slot), admit(slot, *others))[1]  # type: ignore
    completions = engine.generate(prompts, GREEDY)
    assert ids(completions) == ids(plain)
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == bool(options)
    assert stats.kv_cache_usage == 0
    if rates == (0.0,):
        assert stats.num_accepted_tokens == 0 < stats.num_draft_tokens
    if rates == (1.0,):
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    if not options:
        for prompt in prompts:  # alone, slot by slot: each step as the coins have it
            (alone,) = engine.generate([prompt], GREEDY)
            expected = accepted_in_each_step(engine, slots[-1], rates, 41)
            drafting = [count for count, left in _with_room(expected) if left > 0]
            counts = [drafting.count(i) for i in range(max(drafting) + 1)]
            histogram = alone.metrics.speculation.acceptance_histogram
            assert histogram[: len(counts)] == counts
            assert sum(histogram) == len(drafting)


def _with_room(accepted: Sequence[int]) -> list[tuple[int, int]]:
    """Each step's acceptances with the drafts that it had room for."""
    place, steps = 1, []
    for count in accepted:
        steps.append((count, min(K, 41 - place - 1)))
        place += count + 1
    return steps


@pytest.mark.parametrize(("rate", "length"), [(0.0, 1.0), (0.5, 1.9375), (1.0, 5.0)])
def test_the_mean_acceptance_length_is_the_formula_of_the_rate(
    build_tiny: BuildEngine, tmp_path: Path, rate: float, length: float
) -> None:
    prompts = make_prompts(40, longest=20)
    params = SamplingParams(temperature=0.0, max_tokens=101, ignore_eos=True)
    plain = build_tiny().generate(prompts, params)
    engine = build_tiny(speculative=oracle(write_texts(tmp_path / "texts", plain), [rate]))
    engine.generate(prompts, params)
    stats = engine.stats()
    # Near its end a request has room for fewer drafts, which lowers the mean a little where any are accepted.
    tolerance = 0.0 if rate == 0.0 else 0.06
    assert 1 + stats.num_accepted_tokens / stats.num_drafts == pytest.approx(length, rel=tolerance)


def test_prompts_without_a_text_and_requests_that_refuse_draft_nothing(build_tiny: BuildEngine, tmp_path: Path) -> None:
    prompts = make_prompts(6)
    plain = build_tiny().generate(prompts, GREEDY)
    engine = build_tiny(speculative=oracle(write_texts(tmp_path / "texts", plain[:3]), [1.0]))
    off = SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True, speculative_enabled=False)
    completions = engine.generate([*prompts, prompts[0]], [GREEDY] * 6 + [off])
    assert ids(completions) == ids([*plain, plain[0]])
    assert [c.metrics.speculation.num_draft_tokens > 0 for c in completions] == [True] * 3 + [False] * 4


def test_nothing_is_drafted_past_the_end_of_a_text(build_tiny: BuildEngine, tmp_path: Path) -> None:
    prompts = make_prompts(4)
    plain = build_tiny().generate(prompts, GREEDY)
    texts = write_texts(
        tmp_path / "texts", build_tiny().generate(prompts, SamplingParams(temperature=0.0, max_tokens=9))
    )
    engine = build_tiny(speculative=oracle(texts, [1.0]))
    completions = engine.generate(prompts, GREEDY)
    assert ids(completions) == ids(plain)
    for completion in completions:
        assert 0 < completion.metrics.speculation.num_draft_tokens <= 9 + K


def test_the_oracle_changes_no_token_under_any_setting(build_tiny: BuildEngine, tmp_path: Path) -> None:
    prompts = make_prompts(8, longest=40)
    for name, setting in SETTINGS.items():
        params = SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **setting})
        plain = build_tiny().generate(prompts, params)
        engine = build_tiny(speculative=oracle(write_texts(tmp_path / "texts", plain), [0.7]), **TIGHT)
        for _ in range(2):
            assert ids(engine.generate(prompts, params)) == ids(plain), name
        assert 0 < engine.stats().num_accepted_tokens < engine.stats().num_draft_tokens


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", "line 1: JSON"),
        ('\n{"prompt_token_ids": [1]}', "line 2: .*token_ids"),
        ('{"prompt_token_ids": [1], "token_ids": [320]}', "line 1: token id 320 is out of range"),
        ('{"prompt_token_ids": [-1], "token_ids": []}', "line 1"),
    ],
)
def test_a_line_that_is_no_text_is_named(build_tiny: BuildEngine, tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "texts"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        build_tiny(speculative=oracle(file, [1.0]))


def test_a_missing_file_is_named(build_tiny: BuildEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: No such file.*sonar generate --json"):
        build_tiny(speculative=oracle(tmp_path / "nowhere", [1.0]))


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "oracle"},
        {"method": "ngram", "oracle_texts": "file"},
        {"method": "oracle", "oracle_texts": "file", "oracle_rates": []},
        {"method": "oracle", "oracle_texts": "file", "oracle_rates": [1.5]},
    ],
)
def test_an_oracle_needs_texts_and_probabilities(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"oracle|at least 1|less than or equal to 1"):
        SpeculativeConfig(**fields)
