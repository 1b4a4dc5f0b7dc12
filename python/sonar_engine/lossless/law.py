"""Two samples of short token sequences: do they come from one law?

Pearson's chi-square of two samples, in two ways. A tree of prefixes: at every prefix that both samples reached often
enough, the tokens that follow are compared; given how often a prefix was reached, what follows it is independent of
what follows the others, so that statistics and degrees of freedom add up. And each position by itself, whatever came
before: coarser, with more samples a cell. The p-value is the least of these tests', times their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

ALARM = 1e-4  # a p-value below it is a difference
MIN_CELL = 10  # of both samples together; rarer tokens are pooled
MIN_SAMPLES = 25  # of either, to be compared at all

Pair = tuple[np.ndarray, np.ndarray]  # token ids int [N, D] of one sample of a prompt, [M, D] of the other
Counts = tuple[np.ndarray, np.ndarray]  # of each cell in either sample


@dataclass(frozen=True)
class ChiSquare:
    """`p_value`: the probability of at least this much under one law."""

    what: str
    chi_square: float
    degrees_of_freedom: int
    p_value: float


@dataclass(frozen=True)
class LawTest:
    """`p_value` over all tests; None where the samples are too few for any."""

    tests: list[ChiSquare]

    @property
    def p_value(self) -> float | None:
        if not self.tests:
            return None
        return min(1.0, len(self.tests) * min(test.p_value for test in self.tests))

    @property
    def passed(self) -> bool:
        return self.p_value is None or self.p_value >= ALARM


def compare_laws(groups: Mapping[str, Sequence[Pair]]) -> LawTest:
    """`groups`: the pairs of samples that are tested together, by a name."""
    tests = [test for name, pairs in groups.items() for test in _tests(name, pairs)]
    return LawTest([test for test in tests if test is not None])


def _tests(name: str, pairs: Sequence[Pair]) -> Iterator[ChiSquare | None]:
    depth = pairs[0][0].shape[1] if pairs else 0
    yield _test(f"{name}, every prefix", (counts for one, two in pairs for counts in _tree(one, two)))
    for position in range(1, depth):  # the first one is the tree's root
        columns = ((one[:, position], two[:, position]) for one, two in pairs)
        yield _test(f"{name}, position {position}", (_pool(*_count(*pair)[1]) for pair in columns))


def _test(what: str, tables: Iterable[Counts | None]) -> ChiSquare | None:
    """The tables' statistics added up; None when no table has two cells."""
    chi_square, freedom = 0.0, 0
    for table in tables:
        if table is not None:
            chi_square += _pearson(*table)
            freedom += len(table[0]) - 1
    if freedom == 0:
        return None
    half = torch.tensor([freedom / 2, chi_square / 2], dtype=torch.float64)
    return ChiSquare(what, chi_square, freedom, float(torch.special.gammaincc(half[0], half[1])))


def _tree(one: np.ndarray, two: np.ndarray) -> Iterator[Counts | None]:
    """Counts of the next token at every prefix."""
    if min(len(one), len(two)) < MIN_SAMPLES or one.shape[1] == 0:
        return
    tokens, counts = _count(one[:, 0], two[:, 0])
    yield _pool(*counts)
    for token in tokens:
        yield from _tree(one[one[:, 0] == token, 1:], two[two[:, 0] == token, 1:])


def _count(one: np.ndarray, two: np.ndarray) -> tuple[np.ndarray, Counts]:
    """The tokens of either sample, and how often each has them."""
    tokens, at = np.unique(np.concatenate((one, two)), return_inverse=True)
    first, second = at[: len(one)], at[len(one) :]
    return tokens, (np.bincount(first, minlength=len(tokens)), np.bincount(second, minlength=len(tokens)))


def _pool(first: np.ndarray, second: np.ndarray) -> Counts | None:
    """Rare cells become one, together with the smallest others while they are too few; None: no two cells are left."""
    if min(first.sum(), second.sum()) < MIN_SAMPLES:
        return None
    order = np.argsort(-(first + second), kind="stable")
    first, second = first[order], second[order]
    num_kept = int((first + second >= MIN_CELL).sum())
    while 0 < num_kept < len(first) and (first + second)[num_kept:].sum() < MIN_CELL:
        num_kept -= 1
    if num_kept < len(first):
        first, second = (np.append(part[:num_kept], part[num_kept:].sum()) for part in (first, second))
    return (first, second) if len(first) > 1 else None


def _pearson(first: np.ndarray, second: np.ndarray) -> float:
    ratio = float(np.sqrt(second.sum() / first.sum()))
    return float(((first * ratio - second / ratio) ** 2 / (first + second)).sum())
