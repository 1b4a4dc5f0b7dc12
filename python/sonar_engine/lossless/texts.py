"""Completions with speculation off and on: the same tokens? If not, where, and does a near tie explain it?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sonar_kernels import coins

from sonar_engine.sampling.coins import split_seed
from sonar_engine.types import Completion, TokenLogprobs

# Scores this near may change places where results depend, in the last bits, on what else is in a batch.
NEAR_TIES = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}


@dataclass(frozen=True)
class Difference:
    """The first position at which two completions of a prompt differ. A token of None: the completion had ended.

    `near_tie`: both runs score both tokens nearly alike, so that rounding may have decided.
    """

    prompt: int
    position: int
    token_off: int | None
    logprob_off: float | None
    token_on: int | None
    logprob_on: float | None
    near_tie: bool


@dataclass(frozen=True)
class TextsTest:
    """`num_tokens` were compared, up to the first difference of each prompt."""

    num_prompts: int
    num_tokens: int
    max_logprob_difference: float
    differences: list[Difference]


def compare_texts(off: Sequence[Completion], on: Sequence[Completion], dtype: str, seeds: Sequence[int]) -> TextsTest:
    """`seeds`: of each prompt, for completions at temperature 1; empty for temperature 0.

    The completions hold log-probabilities.
    """
    num_tokens, largest, differences = 0, 0.0, []
    for index, (one, two) in enumerate(zip(off, on, strict=True)):
        num_same = _num_same(one.token_ids, two.token_ids)
        num_tokens += num_same
        for a, b in zip(_logprobs(one)[:num_same], _logprobs(two)[:num_same], strict=True):
            largest = max(largest, abs(a.logprob - b.logprob))
        ends = [(each.finish_reason, each.stop_reason, len(each.token_ids)) for each in (one, two)]
        if one.token_ids != two.token_ids or ends[0] != ends[1]:
            seed = seeds[index] if seeds else None
            differences.append(_difference(index, num_same, (one, two), seed, NEAR_TIES[dtype]))
    return TextsTest(len(off), num_tokens, largest, differences)


def _num_same(one: list[int], two: list[int]) -> int:
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))


def _logprobs(completion: Completion) -> list[TokenLogprobs]:
    assert completion.logprobs is not None
    return completion.logprobs


def _difference(
    prompt: int, position: int, runs: tuple[Completion, Completion], seed: int | None, tolerance: float
) -> Difference:
    tokens = [run.token_ids[position] if position < len(run.token_ids) else None for run in runs]
    entries = [_logprobs(run)[position] if position < len(run.token_ids) else None for run in runs]
    near = False
    if None not in tokens:
        pair = [token for token in tokens if token is not None]
        noise = _noise(pair, seed, position)
        gaps = []
        for entry, own in zip(entries, pair, strict=True):
            scores = [_logprob_of(token, own, entry) for token in pair]
            gaps.append(abs(scores[0] - noise[0] - (scores[1] - noise[1])))
        near = all(gap <= tolerance for gap in gaps)
    logprobs = [None if entry is None else entry.logprob for entry in entries]
    return Difference(prompt, position, tokens[0], logprobs[0], tokens[1], logprobs[1], near)


def _logprob_of(token: int, own: int, entry: TokenLogprobs | None) -> float:
    """-inf where the entry does not tell."""
    if entry is None:
        return float("-inf")
    known = {**dict(zip(entry.top_ids, entry.top_logprobs, strict=True)), own: entry.logprob}
    return known.get(token, float("-inf"))


def _noise(tokens: list[int], seed: int | None, position: int) -> list[float]:
    """What the sampler takes from each token's log-probability: nothing at temperature 0, else the seed's noise."""
    if seed is None:
        return [0.0] * len(tokens)
    lo, hi = (torch.tensor([word], dtype=torch.int32) for word in split_seed(seed))
    at = torch.tensor([position], dtype=torch.int32)
    return coins.exponential(torch.tensor(tokens, dtype=torch.int32), lo, hi, at).log().tolist()
