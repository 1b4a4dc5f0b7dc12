"""The counter-based coins: their definition, their uniformity and independence, and one stream a purpose."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sonar_engine.sampling.coins import ACCEPT, DRAFT, RECOVER, SAMPLE, Seeds, accept_coins, draft_seeds, split_seed
from sonar_kernels import coins

INT32 = torch.int32
MASK = 0xFFFFFFFF


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values).to(INT32)


def hashes(ids: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, positions: torch.Tensor) -> np.ndarray:
    return coins.hash_words(ids, lo, hi, positions).numpy().astype(np.int64) & MASK


def normal_score(observed: np.ndarray) -> float:
    """Pearson's statistic against equal expectations, as a normal score (Wilson and Hilferty)."""
    expected, freedom = observed.sum() / observed.size, observed.size - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


def plain_hash(token: int, seed_lo: int, seed_hi: int, position: int) -> int:
    """The coins' definition in Python's own integers."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & MASK
        x ^= x >> 15
        x = x * 0x846CA68B & MASK
        return x ^ (x >> 16)

    h = mix((token * 0x9E3779B9 + seed_lo) & MASK) ^ seed_hi
    return mix((mix(h) + position * 0x85EBCA6B) & MASK)


@given(*(st.integers(0, MASK) for _ in range(4)))
@settings(max_examples=200, deadline=None)
def test_the_hash_is_its_definition_in_wrapping_32_bit_integers(token: int, lo: int, hi: int, position: int) -> None:
    got = hashes(*(words(value) for value in (token, lo, hi, position)))
    assert got.tolist() == [plain_hash(token, lo, hi, position)]


STREAMS = {
    "ids": lambda n: (torch.arange(n), words(7), words(9), words(3)),
    "positions": lambda n: (words(100), words(7), words(9), torch.arange(n)),
    "low words of seeds": lambda n: (words(100), torch.arange(n), words(0), words(3)),
    "high words of seeds": lambda n: (words(100), words(42), torch.arange(n), words(3)),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("shift", [0, 12, 24])
def test_coins_are_uniform_and_neighbours_independent_over(stream: str, shift: int) -> None:
    """Chi-square of 256 buckets of each byte, and of 64 x 64 buckets of neighbouring pairs."""
    got = hashes(*(tensor.to(INT32) for tensor in STREAMS[stream](1 << 18)))
    buckets = (got >> shift) & 0xFF
    assert abs(normal_score(np.bincount(buckets, minlength=256))) < 4
    pairs = (buckets[:-1] >> 2) * 64 + (buckets[1:] >> 2)
    assert abs(normal_score(np.bincount(pairs[::2], minlength=4096))) < 4


def test_coins_of_different_purposes_are_independent() -> None:
    ids, lo, hi = torch.arange(1 << 18).to(INT32), words(1), words(2)
    streams = [hashes(ids, lo, hi ^ purpose, words(5)) >> 26 for purpose in (SAMPLE, ACCEPT, RECOVER, DRAFT)]
    for first, second in itertools.combinations(streams, 2):
        assert abs(normal_score(np.bincount(first * 64 + second, minlength=4096))) < 4


def test_a_biased_coin_would_be_noticed() -> None:
    weak = (np.arange(1 << 18) * 0x9E3779B9 & MASK) >> 24
    pairs = (weak[:-1] >> 2) * 64 + (weak[1:] >> 2)
    assert abs(normal_score(np.bincount(pairs[::2], minlength=4096))) > 20


def test_uniform_coins_stay_below_one_and_exponential_ones_above_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = words(0, 1, -1, -2, 1 << 31)
    monkeypatch.setattr(coins, "hash_words", lambda *arguments: extremes.clone())
    uniform = coins.uniform(extremes, extremes, extremes, extremes)
    assert uniform[0] == 0
    assert uniform.max() < 1
    exponential = coins.exponential(extremes, extremes, extremes, extremes)
    assert exponential.min() > 0
    assert not exponential.isnan().any()


def test_acceptance_coins_are_one_for_each_seed_first_position_and_draft() -> None:
    seeds = Seeds(words(1, 2, 1, 1), words(5, 5, 5, 5))
    drawn = accept_coins(seeds, words(0, 0, 1, 0), 3)
    assert drawn.shape == (4, 3)
    assert torch.equal(drawn[0], drawn[3])
    assert len(set(drawn.flatten().tolist())) == 9


def test_no_coin_of_a_step_comes_back_in_a_later_step() -> None:
    """Block verification looks at the coins and drafts of a whole step, also behind the rejection."""
    seeds = Seeds(words(1).expand(20), words(5).expand(20))
    firsts = torch.arange(20).to(INT32)
    assert accept_coins(seeds, firsts, 16).unique().numel() == 320
    drawn = [hashes(words(3), own.lo, own.hi, firsts) for own in (draft_seeds(seeds, step) for step in range(16))]
    assert len(np.unique(np.stack(drawn))) == 320


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1, 0x80000000])
def test_a_seed_splits_into_its_two_words(seed: int) -> None:
    lo, hi = split_seed(seed)
    assert ((hi & MASK) << 32 | (lo & MASK)) == seed & (2**64 - 1)
    assert -(1 << 31) <= lo < 1 << 31
    assert -(1 << 31) <= hi < 1 << 31
