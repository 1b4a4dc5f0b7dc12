"""The exact law of what verification emits, by enumerating every draft and every outcome over a vocabulary of 3."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from sonar_kernels import DraftVocabulary, SampledRule
from sonar_kernels.accept import accept_torch

rule_module = importlib.import_module("sonar_kernels.sampled_rule")
VOCAB = 3
INT32 = torch.int32
CHOICE = -7  # the target's own choice at every position: neither a draft nor a recovered token
Tree = list[torch.Tensor]  # [i]: float64 [V ** i, V], the law of token i after each prefix, prefixes in base V
Accept = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def random_tree(depth: int, seed: int, temperature: float = 1.0) -> Tree:
    random = torch.Generator().manual_seed(seed)
    shapes = [(VOCAB**i, VOCAB) for i in range(depth)]
    return [(torch.randn(s, generator=random, dtype=torch.float64) / temperature).softmax(dim=1) for s in shapes]


def with_zeros(tree: Tree, token: int) -> Tree:
    """The same with `token` cut from the vocabulary."""
    left = torch.ones(VOCAB, dtype=torch.float64)
    left[token] = 0
    return [level * left / (level * left).sum(dim=1, keepdim=True) for level in tree]


def one_hot(tree: Tree) -> Tree:
    return [torch.nn.functional.one_hot(level.argmax(dim=1), VOCAB).double() for level in tree]


def top_two(tree: Tree) -> Tree:
    kept = [level * (level > level.amin(dim=1, keepdim=True)) for level in tree]
    return [level / level.sum(dim=1, keepdim=True) for level in kept]


def prefix_index(tokens: torch.Tensor) -> torch.Tensor:
    """tokens [N, i] -> [N] index of the prefix in base V."""
    index = torch.zeros(tokens.shape[0], dtype=torch.int64)
    for column in tokens.T:
        index = index * VOCAB + column
    return index


def along(tree: Tree, drafts: torch.Tensor) -> torch.Tensor:
    """The laws at each position of every draft sequence [N, L] -> [N, L, V]."""
    return torch.stack([tree[i][prefix_index(drafts[:, :i])] for i in range(drafts.shape[1])], dim=1)


def all_sequences(length: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product(range(VOCAB), repeat=length)))


def continued(law: torch.Tensor, target: Tree, known: int) -> torch.Tensor:
    """A law over the first `known` tokens, continued by the target to all of its depth."""
    for level in target[known:]:
        law = (law[:, None] * level).flatten()
    return law


@dataclass(frozen=True)
class Setting:
    """Laws of target and draft, the rule, and the draft's reduced vocabulary (its ids as target ids), if any."""

    target: Tree
    draft: Tree
    length: int
    block: bool
    draft_ids: tuple[int, ...] | None = None
    accept: Accept = accept_torch
    dtype: torch.dtype = torch.float64

    def run(self, drafts: torch.Tensor, coins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The engine's accept function over N rows of L drafts."""
        count = drafts.shape[0]
        rows = torch.arange(count, dtype=INT32)
        draft_probs, vocabulary = along(self.draft, drafts), None
        if self.draft_ids is not None:
            draft_probs, vocabulary = draft_probs[..., list(self.draft_ids)], reduced(self.draft_ids)
        rule = SampledRule(
            rows,
            torch.full((count,), self.block),
            along(self.target, drafts).to(self.dtype),
            draft_probs.to(self.dtype),
            coins.to(self.dtype),
            rows * 3 + 1,
            rows * 5 + 2,
            rows * 0,
            vocabulary,
        )
        indptr = torch.arange(count + 1, dtype=INT32) * (self.length + 1)
        choices = torch.full((count * (self.length + 1),), CHOICE, dtype=INT32)
        return self.accept(drafts.to(INT32), torch.full((count,), self.length, dtype=INT32), indptr, choices, rule)

    def acceptance(self, drafts: torch.Tensor) -> torch.Tensor:
        """[N, L]: the coin below which draft i is accepted, all before it having the best of coins (0)
        and all after it the worst (1); by bisecting what the engine's function accepts."""
        step = torch.arange(self.length).repeat(len(drafts))  # the draft whose coin is sought, a row each
        rows = drafts.repeat_interleave(self.length, dim=0)
        later = (torch.arange(self.length) > step[:, None]).double()
        low, high = torch.zeros(len(rows), dtype=torch.float64), torch.ones(len(rows), dtype=torch.float64)
        for _ in range(46):
            middle = (low + high) / 2
            accepted = self.run(rows, later.scatter(1, step[:, None], middle[:, None]))[0] >= step + 2
            low, high = torch.where(accepted, middle, low), torch.where(accepted, high, middle)
        return low.reshape(drafts.shape)


@dataclass(frozen=True)
class Outcomes:
    """Every draft sequence with every outcome of its coins, N rows of L."""

    drafts: torch.Tensor  # [N, L]
    coins: torch.Tensor  # [N, L], each on one side of what decides
    weight: torch.Tensor  # [N], probability of the row

    @classmethod
    def of(cls, setting: Setting) -> Outcomes:
        drafts = all_sequences(setting.length)
        outcomes = torch.tensor(list(itertools.product((False, True), repeat=setting.length)))
        rate = setting.acceptance(drafts).repeat_interleave(len(outcomes), dim=0)
        drawn = along(setting.draft, drafts).gather(2, drafts[..., None])[..., 0].prod(dim=1)
        drafts = drafts.repeat_interleave(len(outcomes), dim=0)
        outcomes = outcomes.repeat(len(drafts) // len(outcomes), 1)
        coins = torch.where(outcomes, rate / 2, (1 + rate) / 2)
        weight = torch.where(outcomes, rate, 1 - rate).prod(dim=1)
        return cls(drafts, coins, weight * drawn.repeat_interleave(2**setting.length))


@contextmanager
def recorded_weights() -> Iterator[list[torch.Tensor]]:
    """Collects what recovered tokens are drawn from, [N, V] a run."""
    weights: list[torch.Tensor] = []
    draw = rule_module.draw

    def recording(law: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        weights.append(law)
        return draw(law, *rest)

    rule_module.draw = recording
    try:
        yield weights
    finally:
        rule_module.draw = draw


def emitted_law(
    setting: Setting, outcomes: Outcomes, num_emitted: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """The law of the first L + 1 output tokens, [V ** (L + 1)]: one verification, then the target alone.

    `num_emitted` [N] is what was decided for the outcomes, `residual` [N, V] what recovered tokens are drawn from.
    """
    residual = residual.double() / residual.double().sum(dim=1, keepdim=True)
    law = torch.zeros(VOCAB ** (setting.length + 1), dtype=torch.float64)
    for count in range(setting.length + 1):  # accepted drafts
        chosen = num_emitted == count + 1
        prefix = prefix_index(outcomes.drafts[chosen][:, :count])
        last = residual[chosen] if count < setting.length else setting.target[count][prefix]
        part = torch.zeros((VOCAB**count, VOCAB), dtype=torch.float64)
        part.index_add_(0, prefix, outcomes.weight[chosen, None] * last)
        law += continued(part.flatten(), setting.target, count + 1)
    return law


def error_of(law: torch.Tensor, target: Tree) -> float:
    """Largest difference between a law and the target's."""
    return float((law - continued(torch.ones(1, dtype=torch.float64), target, 0)).abs().max())


def law_error(setting: Setting) -> float:
    """Largest difference between the law that the engine's function emits and the target's."""
    outcomes = Outcomes.of(setting)
    with recorded_weights() as residuals:
        num_emitted, _ = setting.run(outcomes.drafts, outcomes.coins)
    return error_of(emitted_law(setting, outcomes, num_emitted, residuals[0]), setting.target)


def expected_accepted(setting: Setting) -> float:
    """Mean number of accepted drafts."""
    outcomes = Outcomes.of(setting)
    num_emitted, _ = setting.run(outcomes.drafts, outcomes.coins)
    return float((outcomes.weight * (num_emitted - 1)).sum())


def reduced(target_ids: tuple[int, ...]) -> DraftVocabulary:
    draft_ids = torch.full((VOCAB,), -1, dtype=INT32)
    draft_ids[list(target_ids)] = torch.arange(len(target_ids), dtype=INT32)
    return DraftVocabulary(torch.tensor(target_ids, dtype=INT32), draft_ids)
