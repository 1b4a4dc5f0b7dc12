"""The exact law of what verification emits, by enumerating every draft and every outcome over a vocabulary of 3."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from sonar_kernels.accept import TokenRule, accept_torch

accept_module = importlib.import_module("sonar_kernels.accept")
VOCAB = 3
INT32 = torch.int32
Tree = list[torch.Tensor]  # [i]: float64 [V ** i, V], the law of token i after each prefix, prefixes in base V


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much where other processes are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_tree(depth: int, seed: int, temperature: float = 1.0) -> Tree:
    random = torch.Generator().manual_seed(seed)
    shapes = [(VOCAB**i, VOCAB) for i in range(depth)]
    return [(torch.randn(s, generator=random, dtype=torch.float64) / temperature).softmax(dim=1) for s in shapes]


def prefix_index(tokens: torch.Tensor) -> torch.Tensor:
    """tokens [N, i] -> [N] index of the prefix in base V."""
    index = torch.zeros(tokens.shape[0], dtype=torch.int64)
    for column in tokens.T:
        index = index * VOCAB + column
    return index


def along(tree: Tree, drafts: torch.Tensor) -> torch.Tensor:
    """The laws at each position of every draft sequence [N, L] -> [N, L, V]."""
    return torch.stack([tree[i][prefix_index(drafts[:, :i])] for i in range(drafts.shape[1])], dim=1)


def run_accept(
    drafts: torch.Tensor, target: torch.Tensor, draft: torch.Tensor, coins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's accept function over N rows of L drafts under the token rule; all target choices are -7."""
    count, length = drafts.shape
    rows = torch.arange(count, dtype=INT32)
    rule = TokenRule(rows, target, draft, coins, rows * 3 + 1, rows * 5 + 2, rows * 0)
    indptr = torch.arange(count + 1, dtype=INT32) * (length + 1)
    choices = torch.full((count * (length + 1),), -7, dtype=INT32)
    return accept_torch(drafts.to(INT32), torch.full((count,), length, dtype=INT32), indptr, choices, rule)


def acceptance(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """P(accept) of every token, [n, V], found by bisecting the coin that the engine's function still accepts."""
    count = target.shape[0]
    tokens = torch.arange(VOCAB).repeat(count)[:, None]
    target, draft = (probs.repeat_interleave(VOCAB, dim=0)[:, None] for probs in (target, draft))
    low, high = (torch.full((count * VOCAB, 1), value, dtype=torch.float64) for value in (0.0, 1.0))
    for _ in range(60):
        middle = (low + high) / 2
        accepted = (run_accept(tokens, target, draft, middle)[0] == 2)[:, None]
        low, high = torch.where(accepted, middle, low), torch.where(accepted, high, middle)
    return low.reshape(count, VOCAB)


def emitted_law(target: Tree, draft: Tree, length: int) -> torch.Tensor:
    """The law of the first L + 1 output tokens, [V ** (L + 1)]: one verification, then the target alone.

    Every draft sequence and every outcome of its L coins is run through the engine's accept function.
    """
    drafts = torch.tensor(list(itertools.product(range(VOCAB), repeat=length)))
    outcomes = torch.tensor(list(itertools.product((False, True), repeat=length)))
    rates = [acceptance(target[i], draft[i]) for i in range(length)]
    rate = along(rates, drafts).gather(2, drafts[..., None])[..., 0].repeat_interleave(len(outcomes), dim=0)
    drawn = along(draft, drafts).gather(2, drafts[..., None])[..., 0].prod(dim=1).repeat_interleave(len(outcomes))
    drafts = drafts.repeat_interleave(len(outcomes), dim=0)
    outcomes = outcomes.repeat(len(drafts) // len(outcomes), 1)
    coins = torch.where(outcomes, rate / 2, (1 + rate) / 2)
    weight = drawn * torch.where(outcomes, rate, 1 - rate).prod(dim=1)
    num_emitted, _ = run_accept(drafts, along(target, drafts), along(draft, drafts), coins)

    law = torch.zeros(VOCAB ** (length + 1), dtype=torch.float64)
    for count in range(length + 1):  # accepted drafts
        chosen = num_emitted == count + 1
        prefix = prefix_index(drafts[chosen][:, :count])
        last = target[count][prefix]
        if count < length:
            last = accept_module.residual_weights(last, draft[count][prefix])
            last = last / last.sum(dim=1, keepdim=True)
        part = torch.zeros((VOCAB**count, VOCAB), dtype=torch.float64)
        part.index_add_(0, prefix, weight[chosen, None] * last)
        law += continued(part.flatten(), target, count + 1)
    return law


def continued(law: torch.Tensor, target: Tree, known: int) -> torch.Tensor:
    """A law over the first `known` tokens, continued by the target to all of its depth."""
    for level in target[known:]:
        law = (law[:, None] * level).flatten()
    return law


def law_error(target: Tree, draft: Tree, length: int) -> float:
    wanted = continued(torch.ones(1, dtype=torch.float64), target, 0)
    return float((emitted_law(target, draft, length) - wanted).abs().max())


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


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_token_rule_emits_exactly_the_targets_law(length: int, seed: int) -> None:
    assert law_error(random_tree(length + 1, seed), random_tree(length + 1, seed + 50), length) < 1e-12


CASES: dict[str, tuple[Callable[[Tree], Tree], Callable[[Tree], Tree]]] = {
    "the draft's vocabulary is cut": (lambda tree: tree, lambda tree: with_zeros(tree, 1)),
    "a drafted token is impossible": (lambda tree: with_zeros(tree, 0), lambda tree: tree),
    "both are cut, differently": (lambda tree: with_zeros(tree, 2), lambda tree: with_zeros(tree, 0)),
    "the draft is greedy": (lambda tree: tree, one_hot),
    "top-k on the target alone": (top_two, lambda tree: tree),
    "the target is greedy": (one_hot, lambda tree: tree),
}


@pytest.mark.parametrize("case", CASES)
def test_the_token_rule_is_exact_when(case: str) -> None:
    of_target, of_draft = CASES[case]
    assert law_error(of_target(random_tree(4, 2)), of_draft(random_tree(4, 3)), 3) < 1e-12


def test_the_token_rule_is_exact_when_the_temperatures_differ() -> None:
    assert law_error(random_tree(4, 4, temperature=0.5), random_tree(4, 4, temperature=2.0), 3) < 1e-12


def test_a_draft_from_the_targets_own_law_is_always_accepted() -> None:
    tree = random_tree(4, 6)
    assert law_error(tree, tree, 3) < 1e-12
    for level in tree:
        assert acceptance(level, level).min() > 1 - 1e-15


WRONG_ACCEPTANCE = {
    "the draft's probability is ignored": lambda target, draft, coin: coin < target,
    "the ratio is upside down": lambda target, draft, coin: coin * target < draft,
    "every possible draft is accepted": lambda target, draft, coin: target > coin * 0,
}
WRONG_RESIDUAL = {
    "a softmax of the residual": lambda target, draft: (target - draft).clamp(min=0).softmax(dim=-1),
    "the target itself": lambda target, draft: target,
    "the absolute difference": lambda target, draft: (target - draft).abs(),
}


@pytest.mark.parametrize("version", WRONG_ACCEPTANCE)
def test_enumeration_notices_a_wrong_acceptance(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_module, "token_rule_accepts", WRONG_ACCEPTANCE[version])
    assert law_error(random_tree(4, 0), random_tree(4, 50), 3) > 1e-3


@pytest.mark.parametrize("version", WRONG_RESIDUAL)
def test_enumeration_notices_a_wrong_residual(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_module, "residual_weights", WRONG_RESIDUAL[version])
    assert law_error(random_tree(4, 0), random_tree(4, 50), 3) > 1e-3


def impossible_draft_is_rejected() -> bool:
    """Target probability 0 and a coin of exactly 0."""
    target = torch.tensor([[[0.0, 0.5, 0.5]]])
    draft = torch.tensor([[[1.0, 0.0, 0.0]]])
    num_emitted, tokens = run_accept(torch.tensor([[0]]), target, draft, torch.zeros(1, 1))
    return num_emitted.tolist() == [1] and tokens[0, 0] in (1, 2)


def test_an_impossible_draft_is_rejected_at_a_coin_of_zero() -> None:
    assert impossible_draft_is_rejected()


def test_a_comparison_that_is_not_strict_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_module, "token_rule_accepts", lambda target, draft, coin: coin * draft <= target)
    assert not impossible_draft_is_rejected()


def test_a_zero_residual_falls_back_to_the_target() -> None:
    """Only rounding can reject a draft whose laws are equal; then the target's own law is drawn from."""
    probs = torch.tensor([[0.25, 0.75, 0.0]])
    assert accept_module.residual_weights(probs, probs).tolist() == probs.tolist()


def test_the_recovered_token_comes_from_the_residual_at_the_rejected_position() -> None:
    target, draft = random_tree(4, 7), random_tree(4, 8)
    drafts = torch.tensor(list(itertools.product(range(VOCAB), repeat=3)))
    coins = torch.rand(drafts.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.6 + 0.4
    num_emitted, tokens = run_accept(drafts, along(target, drafts), along(draft, drafts), coins)
    rejected = torch.nonzero(num_emitted < 4)[:, 0].tolist()
    assert {int(num_emitted[row]) for row in rejected} == {1, 2, 3}
    for row in rejected:
        step = int(num_emitted[row]) - 1
        prefix = prefix_index(drafts[row : row + 1, :step])
        weights = accept_module.residual_weights(target[step][prefix], draft[step][prefix])[0]
        assert weights[tokens[row, step]] > 0
        assert tokens[row, :step].tolist() == drafts[row, :step].tolist()


def test_sample_and_match_emits_exactly_the_targets_law() -> None:
    """For any drafts whatever: all target choices are enumerated, whether the drafts equal them or not."""
    length, target = 3, random_tree(4, 9)
    choices = torch.tensor(list(itertools.product(range(VOCAB), repeat=length + 1)), dtype=INT32)
    indptr = torch.arange(len(choices) + 1, dtype=INT32) * (length + 1)
    counts = torch.full((len(choices),), length, dtype=INT32)
    wanted = continued(torch.ones(1, dtype=torch.float64), target, 0)
    for drafts in itertools.product(range(VOCAB), repeat=length):
        row = torch.tensor(drafts)
        at = torch.stack([target[i][prefix_index(row[None, :i])[0]] for i in range(length + 1)])  # [L + 1, V]
        weight = at.expand(len(choices), -1, -1).gather(2, choices.long()[..., None])[..., 0].prod(dim=1)
        num_emitted, tokens = accept_torch(row.to(INT32).expand(len(choices), -1), counts, indptr, choices.flatten())
        law = torch.zeros_like(wanted)
        for count in range(1, length + 2):
            chosen = num_emitted == count
            part = torch.zeros(VOCAB**count, dtype=torch.float64)
            part.index_add_(0, prefix_index(tokens[chosen, :count].long()), weight[chosen])
            law += continued(part, target, count)
        assert float((law - wanted).abs().max()) < 1e-12
