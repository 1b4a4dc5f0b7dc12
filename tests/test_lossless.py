"""How `sonar verify` compares: laws by chi-square, texts token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from sonar_engine.lossless.law import ALARM, compare_laws
from sonar_engine.lossless.texts import compare_texts
from sonar_engine.sampling.coins import split_seed
from sonar_engine.types import Completion, RequestMetrics, TokenLogprobs
from sonar_kernels import gumbel_argmax

VOCAB = 30
METRICS = RequestMetrics(queue_time=0, time_to_first_token=0, decode_time=0, e2e_latency=0)


def draw(rng: np.random.Generator, table: np.ndarray, count: int, length: int = 4) -> np.ndarray:
    """int [count, length]: chains whose next token's law is the row of `table` [V, V] of the token before."""
    tokens = np.zeros((count, length + 1), np.int32)
    cumulative = table.cumsum(axis=1)
    for at in range(length):
        coins = rng.random(count)[:, None]
        tokens[:, at + 1] = (coins > cumulative[tokens[:, at]]).sum(axis=1).clip(max=VOCAB - 1)
    return tokens[:, 1:]


def peaked_table(seed: int) -> np.ndarray:
    scores = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)) * 2
    weights = np.exp(scores)
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("count", [150, 1000])
def test_p_values_of_one_law_are_uniform_so_that_false_alarms_are_rare(count: int) -> None:
    rng, table = np.random.default_rng(0), peaked_table(1)
    tests = [compare_laws({"law": [(draw(rng, table, count), draw(rng, table, count))]}) for _ in range(400)]
    p_values = np.array([each.p_value for test in tests for each in test.tests])
    shares = [float((p_values < level).mean()) for level in (0.01, 0.1, 0.5)]
    assert shares[0] <= 0.03
    assert 0.06 < shares[1] < 0.14
    assert 0.42 < shares[2] < 0.58


def test_the_least_of_several_p_values_raises_no_false_alarms() -> None:
    rng, table = np.random.default_rng(1), peaked_table(1)
    tests = [compare_laws({"law": [(draw(rng, table, 500), draw(rng, table, 500))]}) for _ in range(400)]
    assert all(len(test.tests) == 4 for test in tests)
    assert all(test.passed for test in tests)
    assert np.mean([test.p_value < 0.05 for test in tests]) < 0.08  # type: ignore[operator]


def test_a_law_that_differs_in_the_third_token_alone_is_noticed() -> None:
    rng, table = np.random.default_rng(0), peaked_table(1)
    one, two = draw(rng, table, 1000), draw(rng, table, 1000)
    changed = rng.random(1000) < 0.1
    two[changed, 2] = 7
    test = compare_laws({"law": [(one, two)]})
    assert test.p_value is not None
    assert test.p_value < ALARM
    assert not test.passed
    assert test.tests[1].p_value > 0.01  # position 1
    assert test.tests[2].p_value < ALARM  # position 2


def test_a_token_that_only_one_sample_has_is_noticed() -> None:
    one = np.zeros((200, 1), np.int32)
    two = one.copy()
    two[:30] = 1
    assert not compare_laws({"law": [(one, two)]}).passed
    assert compare_laws({"law": [(one, one)]}).p_value is None


def test_too_few_samples_decide_nothing() -> None:
    rng, table = np.random.default_rng(0), peaked_table(1)
    test = compare_laws({"law": [(draw(rng, table, 20), draw(rng, peaked_table(2), 20))]})
    assert (test.tests, test.p_value, test.passed) == ([], None, True)


# Texts


def completion(token_ids: list[int], logits: torch.Tensor, finish: str = "length") -> Completion:
    """Whose tokens were chosen from `logits` [T, V] and report all log-probabilities."""
    entries = []
    for row, token in zip(logits.log_softmax(dim=1), token_ids, strict=False):
        top = row.sort(descending=True)
        rank = int((row > row[token]).sum()) + 1
        entries.append(TokenLogprobs(float(row[token]), rank, top.indices.tolist(), top.values.tolist()))
    return Completion(
        index=0,
        text="",
        prompt_token_ids=[1],
        token_ids=token_ids,
        finish_reason=finish,  # type: ignore[arg-type]
        stop_reason=None,
        logprobs=entries,
        metrics=METRICS,
    )


LOGITS = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))


def test_equal_texts_have_no_difference() -> None:
    tokens = LOGITS.argmax(dim=1).tolist()
    one, two = completion(tokens, LOGITS), completion(tokens, LOGITS + 1e-3)
    test = compare_texts([one, two], [two, one], "float32", [])
    assert (test.num_prompts, test.num_tokens, test.differences) == (2, 10, [])
    assert test.max_logprob_difference < 1e-4


def test_the_first_different_token_is_reported_with_both_log_probabilities() -> None:
    tokens = LOGITS.argmax(dim=1).tolist()
    other = [*tokens[:3], int(LOGITS[3].argmin()), tokens[4]]
    one, two = completion(tokens, LOGITS), completion(other, LOGITS)
    (difference,) = compare_texts([one], [two], "float32", []).differences
    assert (difference.prompt, difference.position) == (0, 3)
    assert (difference.token_off, difference.token_on) == (tokens[3], other[3])
    assert difference.logprob_off == pytest.approx(float(LOGITS[3].log_softmax(dim=0).max()))
    assert difference.logprob_on == pytest.approx(float(LOGITS[3].log_softmax(dim=0).min()))
    assert not difference.near_tie


def test_an_end_at_another_place_or_for_another_reason_is_a_difference() -> None:
    tokens = LOGITS.argmax(dim=1).tolist()
    whole, shorter = completion(tokens, LOGITS), completion(tokens[:4], LOGITS, "stop")
    (difference,) = compare_texts([whole], [shorter], "float32", []).differences
    assert (difference.position, difference.token_off, difference.token_on) == (4, tokens[4], None)
    assert not difference.near_tie
    assert len(compare_texts([whole], [replace(whole, finish_reason="stop")], "float32", []).differences) == 1


@pytest.mark.parametrize("nearness", [1e-5, 0.5])
def test_greedy_tokens_whose_logits_nearly_tie_in_both_runs_are_a_near_tie(nearness: float) -> None:
    logits = LOGITS.clone()
    best, second = logits[2].topk(2).indices.tolist()
    logits[2, second] = logits[2, best] - nearness
    tokens = logits.argmax(dim=1).tolist()
    other = [*tokens[:2], second, *tokens[3:]]
    (difference,) = compare_texts([completion(tokens, logits)], [completion(other, logits)], "float32", []).differences
    assert difference.near_tie == (nearness < 1e-3)
    # A run with other logits may not excuse itself.
    wrong = logits.clone()
    wrong[2, second] += 1
    (difference,) = compare_texts([completion(tokens, logits)], [completion(other, wrong)], "float32", []).differences
    assert not difference.near_tie


def test_seeded_tokens_are_a_near_tie_where_logit_and_noise_together_nearly_tie() -> None:
    seed, position = 5, 1
    lo, hi = (torch.tensor([word], dtype=torch.int32) for word in split_seed(seed))

    def choice(logits: torch.Tensor) -> int:
        at = torch.tensor([position], dtype=torch.int32)
        return int(gumbel_argmax(logits[None], torch.ones(1), lo, hi, at))

    off = LOGITS.clone()
    chosen = choice(off[position])
    lowered = off.clone()
    for bits in range(12, -25, -1):  # lower the chosen token until another one only just takes its place
        trial = lowered.clone()
        trial[position, chosen] -= 2.0**bits
        if choice(trial[position]) == chosen:
            lowered = trial
    on = lowered.clone()
    on[position, chosen] -= 1e-4
    other = choice(on[position])
    assert other != chosen
    tokens = [int(off[0].argmax()), chosen]
    runs = [completion([tokens[0], token], logits) for token, logits in ((chosen, lowered), (other, on))]
    (difference,) = compare_texts(runs[:1], runs[1:], "float32", [seed]).differences
    assert difference.near_tie
    (difference,) = compare_texts(runs[:1], runs[1:], "float32", [seed + 1]).differences
    assert not difference.near_tie
