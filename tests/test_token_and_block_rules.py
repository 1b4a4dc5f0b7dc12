"""Token and block verification emit exactly the target's law, by enumeration; wrong versions of them are noticed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from exact_law import (
    CHOICE,
    INT32,
    VOCAB,
    Setting,
    Tree,
    all_sequences,
    along,
    continued,
    expected_accepted,
    law_error,
    one_hot,
    prefix_index,
    random_tree,
    top_two,
    with_zeros,
)
from sonar_kernels import SampledRule
from sonar_kernels.accept import accept_torch

rule_module = importlib.import_module("sonar_kernels.sampled_rule")
RULES = pytest.mark.parametrize("block", [False, True], ids=["token", "block"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much where other processes are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_setting(block: bool, length: int = 3, seed: int = 0) -> Setting:
    return Setting(random_tree(length + 1, seed), random_tree(length + 1, seed + 50), length, block)


@RULES
@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_rule_emits_exactly_the_targets_law(block: bool, length: int, seed: int) -> None:
    assert law_error(random_setting(block, length, seed)) < 1e-12


CASES: dict[str, tuple[Callable[[Tree], Tree], Callable[[Tree], Tree]]] = {
    "the draft's vocabulary is cut": (lambda tree: tree, lambda tree: with_zeros(tree, 1)),
    "a drafted token is impossible": (lambda tree: with_zeros(tree, 0), lambda tree: tree),
    "both are cut, differently": (lambda tree: with_zeros(tree, 2), lambda tree: with_zeros(tree, 0)),
    "the draft is greedy": (lambda tree: tree, one_hot),
    "top-k on the target alone": (top_two, lambda tree: tree),
    "the target is greedy": (one_hot, lambda tree: tree),
    "both are greedy": (one_hot, one_hot),
}


@RULES
@pytest.mark.parametrize("case", CASES)
def test_the_rule_is_exact_when(block: bool, case: str) -> None:
    of_target, of_draft = CASES[case]
    assert law_error(Setting(of_target(random_tree(4, 2)), of_draft(random_tree(4, 3)), 3, block)) < 1e-12


@RULES
def test_the_rule_is_exact_when_the_temperatures_differ(block: bool) -> None:
    target, draft = random_tree(4, 4, temperature=0.5), random_tree(4, 4, temperature=2.0)
    assert law_error(Setting(target, draft, 3, block)) < 1e-12


@RULES
@pytest.mark.parametrize("draft_ids", [(2, 0), (0, 2), (2,), (2, 0, 1)])
def test_the_rule_is_exact_over_a_reduced_vocabulary_of_the_draft(block: bool, draft_ids: tuple[int, ...]) -> None:
    draft = random_tree(4, 8)
    for token in {0, 1, 2}.difference(draft_ids):
        draft = with_zeros(draft, token)
    assert law_error(Setting(random_tree(4, 7), draft, 3, block, draft_ids)) < 1e-12


@RULES
def test_a_draft_from_the_targets_own_law_is_always_accepted(block: bool) -> None:
    tree = random_tree(4, 6)
    setting = Setting(tree, tree, 3, block)
    assert law_error(setting) < 1e-12
    assert expected_accepted(setting) == pytest.approx(3, abs=1e-12)
    drafts = all_sequences(3)
    num_emitted, _ = setting.run(drafts, torch.full(drafts.shape, 1 - 2.0**-24))
    assert num_emitted.unique().tolist() == [4]


@RULES
def test_a_row_without_drafts_emits_the_targets_own_choice(block: bool) -> None:
    probs = torch.full((1, 2, VOCAB), 1 / 3)
    zero = torch.zeros(1, dtype=INT32)
    rule = SampledRule(zero, torch.tensor([block]), probs, probs, torch.zeros(1, 2), zero, zero, zero)
    indptr = torch.tensor([0, 1], dtype=INT32)
    choice = torch.tensor([CHOICE], dtype=INT32)
    num_emitted, tokens = accept_torch(torch.tensor([[1, 2]], dtype=INT32), zero, indptr, choice, rule)
    assert (num_emitted.tolist(), tokens.tolist()) == ([1], [[CHOICE, -1, -1]])


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_block_verification_accepts_at_least_as_much_as_token_verification(length: int) -> None:
    """More for chains, the same for a single draft and for greedy drafts."""
    gains = []
    for seed in range(4):
        setting = random_setting(True, length, seed)
        gains.append(expected_accepted(setting) - expected_accepted(replace(setting, block=False)))
        greedy = replace(setting, draft=one_hot(setting.draft))
        assert expected_accepted(greedy) == pytest.approx(expected_accepted(replace(greedy, block=False)), abs=1e-12)
    assert min(gains) > -1e-12
    assert (max(gains) > 0.01) == (length > 1)


# Wrong versions


def worst_error(block: bool) -> float:
    return max(law_error(random_setting(block, seed=seed)) for seed in (0, 3, 15, 23))


WRONG_TOKEN_RULES = {
    "the draft's probability is ignored": ("token_rule_accepts", lambda target, draft, coin: coin < target),
    "the ratio is upside down": ("token_rule_accepts", lambda target, draft, coin: coin * target < draft),
    "every possible draft is accepted": ("token_rule_accepts", lambda target, draft, coin: target > coin * 0),
    "a softmax of the residual": (
        "residual_weights",
        lambda target, draft, factor, vocabulary: (target - draft).clamp(min=0).softmax(dim=-1),
    ),
    "the target for a residual": ("residual_weights", lambda target, draft, factor, vocabulary: target),
    "the absolute difference": ("residual_weights", lambda target, draft, factor, vocabulary: (target - draft).abs()),
}


@pytest.mark.parametrize("version", WRONG_TOKEN_RULES)
def test_enumeration_notices_a_wrong_token_rule(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_module, *WRONG_TOKEN_RULES[version])
    assert law_error(random_setting(block=False)) > 1e-3


def uncapped_product(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.ones_like(target_probs[:, :1]), (target_probs / draft_probs).cumprod(dim=1)], dim=1)


def token_residual(target: torch.Tensor, draft: torch.Tensor, factor: torch.Tensor, vocabulary: None) -> torch.Tensor:
    return (target - draft).clamp(min=0)


WRONG_BLOCK_RULES = {
    "stops at the first coin that fails": ("longest_accepted", rule_module.leading_accepted, 0.08),
    "h is P": ("block_rule_accepts", lambda prefixes, masses, is_last, coins: coins < prefixes, 0.02),
    "the product is not capped": ("prefix_acceptance", uncapped_product, 0.02),
    "the token rule's residual": ("residual_weights", token_residual, 0.003),
}


@pytest.mark.parametrize("version", WRONG_BLOCK_RULES)
def test_enumeration_notices_a_wrong_block_rule(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong, error = WRONG_BLOCK_RULES[version]
    assert worst_error(block=True) < 1e-12
    monkeypatch.setattr(rule_module, name, wrong)
    assert worst_error(block=True) > error


# Edges


def impossible_draft_is_rejected(block: bool) -> bool:
    """Target probability 0 and a coin of exactly 0."""
    zero = torch.zeros(1, dtype=INT32)
    target, draft = torch.tensor([[[0.0, 0.5, 0.5]]]), torch.tensor([[[1.0, 0.0, 0.0]]])
    rule = SampledRule(zero, torch.tensor([block]), target, draft, torch.zeros(1, 1), zero, zero, zero)
    indptr, choices = torch.tensor([0, 2], dtype=INT32), torch.full((2,), CHOICE, dtype=INT32)
    num_emitted, tokens = accept_torch(zero[:, None], torch.ones_like(zero), indptr, choices, rule)
    return num_emitted.tolist() == [1] and tokens[0, 0] in (1, 2)


@RULES
def test_an_impossible_draft_is_rejected_at_a_coin_of_zero(block: bool) -> None:
    assert impossible_draft_is_rejected(block)


def test_a_comparison_that_is_not_strict_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_module, "token_rule_accepts", lambda target, draft, coin: coin * draft <= target)
    monkeypatch.setattr(rule_module, "block_rule_accepts", lambda prefixes, masses, is_last, coin: coin <= prefixes)
    assert not impossible_draft_is_rejected(block=False)
    assert not impossible_draft_is_rejected(block=True)


def test_a_zero_residual_falls_back_to_the_target() -> None:
    """Only rounding can reject a draft whose laws are equal; then the target's own law is drawn from."""
    probs = torch.tensor([[0.25, 0.75, 0.0]])
    assert rule_module.residual_weights(probs, probs, torch.ones(1), None).tolist() == probs.tolist()


def test_no_residual_and_a_certain_prefix_is_a_pass_of_none() -> None:
    """h = 0 / 0 where P is 1 and the laws at the next position are equal: not NaN, and not accepted."""
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    last = torch.zeros(1, 1, dtype=torch.bool)
    assert not rule_module.block_rule_accepts(one, zero, last, zero).item()
    assert rule_module.block_rule_accepts(one, zero + 1e-30, last, one - 2.0**-24).item()


def test_a_prefix_survives_probabilities_at_the_ends_of_single_precision() -> None:
    target = torch.tensor([[1e-38, 1.0, 0.0, 0.5], [0.5, 0.0, 0.5, 0.5], [0.5, 1e-38, 1.0, 1.0]])
    draft = torch.tensor([[1.0, 1e-38, 0.5, 0.5], [0.0, 1.0, 0.0, 0.5], [1e-38, 1.0, 1e-38, 0.5]])
    wanted = [[1, 1e-38, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1e-38, 1, 1]]
    assert torch.equal(rule_module.prefix_acceptance(target, draft), torch.tensor(wanted))


@RULES
def test_the_recovered_token_comes_from_the_residual_at_the_rejected_position(block: bool) -> None:
    setting = Setting(random_tree(4, 7), random_tree(4, 8), 3, block)
    drafts = all_sequences(3)
    coins = torch.rand(drafts.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.6 + 0.4
    num_emitted, tokens = setting.run(drafts, coins)
    rejected = torch.nonzero(num_emitted < 4)[:, 0].tolist()
    assert {int(num_emitted[row]) for row in rejected} == {1, 2, 3}
    drawn = [along(tree, drafts).gather(2, drafts[..., None])[..., 0] for tree in (setting.target, setting.draft)]
    factors = rule_module.prefix_acceptance(*drawn) if block else torch.ones(len(drafts), 4)
    for row in rejected:
        step = int(num_emitted[row]) - 1
        prefix = prefix_index(drafts[row : row + 1, :step])
        weights = factors[row, step] * setting.target[step][prefix] - setting.draft[step][prefix]
        assert weights[0, tokens[row, step]] > 0
        assert tokens[row, :step].tolist() == drafts[row, :step].tolist()


def test_sample_and_match_emits_exactly_the_targets_law() -> None:
    """For any drafts whatever: all target choices are enumerated, whether the drafts equal them or not."""
    length, target = 3, random_tree(4, 9)
    choices = all_sequences(length + 1).to(INT32)
    indptr = torch.arange(len(choices) + 1, dtype=INT32) * (length + 1)
    counts = torch.full((len(choices),), length, dtype=INT32)
    wanted = continued(torch.ones(1, dtype=torch.float64), target, 0)
    for row in all_sequences(length):
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
