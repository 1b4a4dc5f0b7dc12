"""Every field's type and range, what only works together, and the context limit."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_batches import sampled_batch
from sonar_engine.errors import InvalidRequestError
from sonar_engine.sampling.state import SamplingState
from sonar_engine.sampling.validation import validate
from sonar_engine.types import SamplingParams
from sonar_engine.verification.verifier import Verifier

VOCAB = 50


def check(
    params: SamplingParams, *, num_prompt_tokens: int = 10, max_model_len: int = 100, **more: Any
) -> SamplingParams:
    return validate(params, vocab_size=VOCAB, max_model_len=max_model_len, num_prompt_tokens=num_prompt_tokens, **more)


BAD_IDS = [-1, VOCAB, 2**31, 2**63, 2**64 + 1, True, 1.0, "1", None]
BAD: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-0.1, math.nan, math.inf, -math.inf, 10**400, "1", True, None)),
    *(("top_p", value) for value in (0.0, -0.5, 1.01, math.nan, "0.9", None)),
    *(("min_p", value) for value in (-0.01, 1.5, math.nan)),
    *(("top_k", value) for value in (-2, 1.5, "3", 2**63, True, None)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, math.nan, "0")),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, math.inf)),
    *(("repetition_penalty", value) for value in (0, 0.0, -1.0, math.inf, math.nan, 1e-9, 1e9)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, 1.0, "7", True)),
    *(("logprobs", value) for value in (-1, 21, 2.0, "5", True)),
    *(("max_tokens", value) for value in (0, -1, 91, 2**63, 10**30, 1.0, "5")),
    *(("min_tokens", value) for value in (-1, 91, 2**70, 0.5)),
    *(("num_speculative_tokens", value) for value in (-1, 2**31, "3")),
    *(("priority", value) for value in (2**31, -(2**31) - 1, 0.5, None)),
    *(("stop", value) for value in ("abc", [""], ["x" * 257], ["a"] * 17, [1], None, {"a": 1})),
    *(("cache_salt", value) for value in ("", "x" * 257, 7)),
    *(("ignore_eos", value) for value in (1, "true", None)),
    *(("skip_special_tokens", value) for value in (0, None)),
    *(("include_stop_str_in_output", value) for value in ("yes", None)),
    *(("speculative_enabled", value) for value in (1, None)),
    *(("stop_token_ids", [value]) for value in BAD_IDS),
    *(("allowed_token_ids", [3, value]) for value in BAD_IDS),
    *(("banned_token_ids", [value]) for value in BAD_IDS),
    *(("logit_bias", {value: 1.0}) for value in BAD_IDS),
    *(("logit_bias", {3: value}) for value in (math.nan, math.inf, -math.inf, 100.5, -101, "1", None, True)),
    ("logit_bias", [3]),
    ("stop_token_ids", 3),
    ("stop_token_ids", "12"),
    ("allowed_token_ids", []),
    ("banned_token_ids", list(range(VOCAB))),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: repr(value)[:40])
def test_a_value_out_of_range_is_refused_in_one_line_that_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check(SamplingParams(**{field: value}))
    assert refused.value.param == field
    assert field in str(refused.value) or field == "max_tokens"
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 250


GOOD: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (0, 0.0, 1e-4, 2, 1000.0)),
    *(("top_p", value) for value in (1e-6, 1, 1.0)),
    *(("min_p", value) for value in (0, 1.0)),
    *(("top_k", value) for value in (-1, 0, 1, VOCAB, 10**9)),
    *(("presence_penalty", value) for value in (-2, 2.0)),
    *(("repetition_penalty", value) for value in (0.5, 2, 1.1)),
    *(("seed", value) for value in (0, -1, 2**63 - 1, -(2**63))),
    *(("logprobs", value) for value in (0, 20)),
    *(("max_tokens", value) for value in (1, 90)),
    *(("min_tokens", value) for value in (0, 90)),
    *(("stop", value) for value in ([], ["x" * 256] * 16, ["é"])),
    *(("stop_token_ids", value) for value in ([], [0, VOCAB - 1])),
    ("allowed_token_ids", [0]),
    ("banned_token_ids", list(range(1, VOCAB))),
    ("logit_bias", {0: -100, VOCAB - 1: 100.0}),
    ("cache_salt", "tenant"),
    ("num_speculative_tokens", 0),
]


@pytest.mark.parametrize(("field", "value"), GOOD, ids=lambda value: repr(value)[:40])
def test_the_edges_of_every_range_are_allowed(field: str, value: Any) -> None:
    check(SamplingParams(**{field: value}))


def test_defaults_are_resolved() -> None:
    got = check(SamplingParams(top_k=-1, logit_bias={}, banned_token_ids=[], stop_token_ids=[3, 4, 3]))
    assert got == SamplingParams(top_k=0, max_tokens=90, stop_token_ids=[3, 4])


def test_a_top_k_of_the_whole_vocabulary_is_off() -> None:
    assert check(SamplingParams(top_k=VOCAB)).top_k == 0
    assert check(SamplingParams(top_k=VOCAB - 1)).top_k == VOCAB - 1


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert check(SamplingParams(temperature=1e-6)).temperature == 0
    assert check(SamplingParams(temperature=1e-5)).temperature == 1e-5


def test_too_many_bias_entries_are_refused() -> None:
    bias = dict.fromkeys(range(1025), 1.0)
    with pytest.raises(InvalidRequestError, match="1024"):
        validate(SamplingParams(logit_bias=bias), vocab_size=2000, max_model_len=10, num_prompt_tokens=1)


def test_allowed_less_banned_must_leave_a_token() -> None:
    check(SamplingParams(allowed_token_ids=[1, 2], banned_token_ids=[1]))
    with pytest.raises(InvalidRequestError) as refused:
        check(SamplingParams(allowed_token_ids=[1, 2], banned_token_ids=[1, 2]))
    assert refused.value.param == "banned_token_ids"


def test_min_tokens_needs_a_token_that_does_not_end_the_text() -> None:
    only_ends = SamplingParams(allowed_token_ids=[1, 2], stop_token_ids=[1], min_tokens=1)
    check(only_ends)
    with pytest.raises(InvalidRequestError) as refused:
        check(only_ends, eos_token_ids=[2])
    assert refused.value.param == "min_tokens"
    check(msgspec.structs.replace(only_ends, min_tokens=0), eos_token_ids=[2])


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_tokens \(6\) is above max_tokens \(5\)"):
        check(SamplingParams(min_tokens=6, max_tokens=5))


# The context limit


def test_a_prompt_of_one_token_less_than_the_context_works() -> None:
    assert check(SamplingParams(), num_prompt_tokens=99).max_tokens == 1
    assert check(SamplingParams(max_tokens=1), num_prompt_tokens=99).max_tokens == 1


def test_prompt_and_output_may_fill_the_context_exactly() -> None:
    assert check(SamplingParams(max_tokens=60), num_prompt_tokens=40).max_tokens == 60


def test_no_limit_means_the_rest_of_the_context() -> None:
    assert check(SamplingParams(), num_prompt_tokens=40).max_tokens == 60


@pytest.mark.parametrize(
    ("num_prompt", "asked", "words"),
    [
        (100, None, ["context length is 100 tokens", "has 100 tokens", "shorten the prompt"]),
        (250, 3, ["context length is 100 tokens", "has 250 tokens", "3 output tokens", "shorten the prompt"]),
        (90, 11, ["context length is 100 tokens", "has 90 tokens", "11 output tokens", "at most 10"]),
    ],
)
def test_a_request_beyond_the_context_says_limit_prompt_and_asked(
    num_prompt: int, asked: int | None, words: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check(SamplingParams(max_tokens=asked), num_prompt_tokens=num_prompt)
    assert refused.value.code == "context_length_exceeded"
    for word in words:
        assert word in str(refused.value)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty") as refused:
        check(SamplingParams(), num_prompt_tokens=0)
    assert refused.value.param == "prompt"


# What passes is served


NUMBERS = st.one_of(
    st.integers(-3, 60),
    st.sampled_from([2**31, 2**63, -(2**63), 10**40]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 2),
    st.sampled_from([None, True, "1"]),
)
IDS = st.one_of(st.none(), st.lists(st.integers(-1, VOCAB), max_size=4))
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.floats(0, 3) for name in ("temperature", "repetition_penalty")},
        **{name: st.floats(0, 1) for name in ("top_p", "min_p")},
        **{name: st.floats(-2, 2) for name in ("presence_penalty", "frequency_penalty")},
        **{name: NUMBERS for name in ("top_k", "seed", "logprobs", "max_tokens", "min_tokens", "priority")},
        **{name: IDS for name in ("allowed_token_ids", "banned_token_ids", "stop_token_ids")},
        "logit_bias": st.dictionaries(st.integers(-1, VOCAB), st.floats(-120, 120), max_size=3),
    },
)


@given(FIELDS)
@settings(max_examples=300, deadline=None)
def test_anything_is_either_refused_or_sampled_to_a_valid_token(fields: dict[str, Any]) -> None:
    try:
        params = check(SamplingParams(**fields), eos_token_ids=[0])
    except InvalidRequestError as refused:
        assert refused.param
        return
    state = SamplingState(1, VOCAB, "cpu", [0])
    state.admit(0, params, np.array([1, 2], np.int32), np.array([], np.int32), params_seed=3)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 20
    verdict, _ = Verifier(state).verify(logits, sampled_batch([0], [0], [0]), None)
    token = int(verdict.tokens[0, 0])
    assert 0 <= token < VOCAB
    assert params.allowed_token_ids is None or token in params.allowed_token_ids
    assert token not in (params.banned_token_ids or [])
    assert params.min_tokens == 0 or token not in {0, *params.stop_token_ids}


def test_lists_of_token_ids_are_bounded_before_they_are_walked():
    for field, most in (("stop_token_ids", 1024), ("allowed_token_ids", VOCAB), ("banned_token_ids", VOCAB)):
        getattr(check(SamplingParams(**{field: [3] * most})), field).index(3)
        with pytest.raises(InvalidRequestError, match=f"at most {most}") as caught:
            check(SamplingParams(**{field: [3] * (most + 1)}))
        assert caught.value.param == field
