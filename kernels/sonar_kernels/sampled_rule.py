"""Verification of drafts drawn from known probabilities, without loss: token and block verification in torch.

N = rows under the rule, D = decode rows, K = most drafts of any row, V = the target's vocabulary, W = the draft's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sonar_kernels import coins


@dataclass(frozen=True)
class DraftVocabulary:
    """Which target ids a draft can draw, where it has a vocabulary of its own; distinct ids on both sides."""

    target_ids: torch.Tensor  # int32 [W], target id of each draft id
    draft_ids: torch.Tensor  # int32 [V], draft id of each target id, -1 where there is none


@dataclass(frozen=True)
class SampledRule:
    """What token or block verification needs beside the drafts.

    Block: Sun et al., arXiv 2403.10444, algorithm 2. Token: Leviathan et al., arXiv 2211.17192, algorithm 1.
    Entries at or beyond a row's number of drafts are ignored. Block verification looks at every coin of a row and at
    every draft, also behind the last one accepted, so neither the coins nor the noise that drew the drafts may come
    up again in a later step.
    """

    requests: torch.Tensor  # int32 [N], batch rows below D, each once
    block: torch.Tensor  # bool [N], block verification, else token verification
    target_probs: torch.Tensor  # fp32 [N, K, V], the target's distribution at each draft's position
    draft_probs: torch.Tensor  # fp32 [D, K, W], what each draft was drawn from
    accept_coins: torch.Tensor  # fp32 [N, K], uniform in [0, 1)
    seed_lo: torch.Tensor  # int32 [N], seeds of the recovered token's noise
    seed_hi: torch.Tensor  # int32 [N]
    positions: torch.Tensor  # int32 [N], output position of the first draft
    vocabulary: DraftVocabulary | None = None  # None: W = V, with the same ids


def count_accepted(
    draft_tokens: torch.Tensor, num_draft_tokens: torch.Tensor, rule: SampledRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts int64 [N], and the factor [N] of the target's distribution in the residual after them."""
    requests = rule.requests.long()
    num_drafts = num_draft_tokens[requests, None]
    steps = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    drafted = steps < num_drafts
    target_probs, draft_probs = _probs_of_drafts(draft_tokens[requests].long().where(drafted, 0), rule)
    accepted = token_rule_accepts(target_probs, draft_probs, rule.accept_coins)
    count = leading_accepted(accepted & drafted)
    if not rule.block.any():
        return count, torch.ones_like(target_probs[:, 0])
    prefixes = prefix_acceptance(target_probs, draft_probs)  # [N, K + 1]
    masses = _residual_masses(prefixes, rule)
    is_last = steps + 1 == num_drafts
    accepted = block_rule_accepts(prefixes[:, 1:], masses, is_last, rule.accept_coins)
    count = torch.where(rule.block, longest_accepted(accepted & drafted), count)
    prefix = prefixes.gather(1, count[:, None])[:, 0]
    return count, torch.where(rule.block, prefix, torch.ones_like(prefix))


def token_rule_accepts(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, accept_coins: torch.Tensor
) -> torch.Tensor:
    """Whether each draft is accepted, from its probabilities under target and draft: coin < target / draft.

    The comparison is strict and free of division, so that a target probability of 0 rejects even at a coin of 0.
    """
    return accept_coins * draft_probs < target_probs


def prefix_acceptance(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """[N, K] probabilities of the drafts -> [N, K + 1]: P_0 = 1, P_i = min(P_{i-1} * target_i / draft_i, 1).

    A draft that had probability 0 (only rounding can bring it) counts as one that the target prefers.
    """
    prefixes = [torch.ones_like(target_probs[:, 0])]
    for target, draft in zip(target_probs.unbind(1), draft_probs.unbind(1), strict=True):
        joint = prefixes[-1] * target
        prefixes.append(torch.where(joint < draft, joint / draft, (joint > 0).to(joint.dtype)))
    return torch.stack(prefixes, dim=1)


def block_rule_accepts(
    prefixes: torch.Tensor, masses: torch.Tensor, is_last: torch.Tensor, accept_coins: torch.Tensor
) -> torch.Tensor:
    """Whether the first i drafts pass, for i = 1..K: coin_i < h_i, all arguments [N, K].

    h_i = Z_i / (Z_i + 1 - P_i), and P_i for the last draft of a row. Free of division: 0 / 0 is 0, and then a longer
    prefix passes with certainty.
    """
    return torch.where(is_last, accept_coins < prefixes, accept_coins * (masses + (1 - prefixes)) < masses)


def leading_accepted(accepted: torch.Tensor) -> torch.Tensor:
    """bool [N, K] -> int64 [N]: drafts before the first that is not accepted."""
    return accepted.cumprod(dim=1).sum(dim=1)


def longest_accepted(accepted: torch.Tensor) -> torch.Tensor:
    """bool [N, K] -> int64 [N]: length of the longest prefix that passes, whether or not shorter ones do."""
    lengths = torch.arange(1, accepted.shape[1] + 1, device=accepted.device)
    return torch.where(accepted, lengths, 0).amax(dim=1)


def residual_mass(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, factor: torch.Tensor, vocabulary: DraftVocabulary | None
) -> torch.Tensor:
    """Sum over the vocabulary of max(factor * target - draft, 0): [N, V], [N, W], [N] -> [N]."""
    if vocabulary is None:
        return (target_probs * factor[:, None] - draft_probs).clamp_(min=0).sum(dim=1)
    inside = target_probs[:, vocabulary.target_ids.long()] * factor[:, None] - draft_probs
    outside = target_probs.masked_fill(vocabulary.draft_ids >= 0, 0).sum(dim=1)
    return inside.clamp_(min=0).sum(dim=1) + outside * factor


def residual_weights(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, factor: torch.Tensor, vocabulary: DraftVocabulary | None
) -> torch.Tensor:
    """Unnormalised law [N, V] of the recovered token: max(factor * target - draft, 0); target if that is zero."""
    weights = target_probs * factor[:, None]
    if vocabulary is None:
        weights -= draft_probs
    else:
        weights.index_add_(1, vocabulary.target_ids, draft_probs, alpha=-1)
    weights.clamp_(min=0)
    return torch.where(weights.sum(dim=1, keepdim=True) > 0, weights, target_probs)


def draw(weights: torch.Tensor, seed_lo: torch.Tensor, seed_hi: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """weights [N, V], the rest int32 [N] -> int32 [N], drawn in proportion to the weights."""
    ids = torch.arange(weights.shape[1], dtype=torch.int32, device=weights.device)
    noise = coins.exponential(ids, seed_lo[:, None], seed_hi[:, None], positions[:, None])
    return (weights / noise).argmax(dim=1).to(torch.int32)


def put_recovered_tokens(
    final: torch.Tensor, count: torch.Tensor, factor: torch.Tensor, num_draft_tokens: torch.Tensor, rule: SampledRule
) -> None:
    """Overwrites `final` int32 [R] in the rows that rejected a draft; `count` and `factor` as from `count_accepted`."""
    requests = rule.requests.long()
    step = count.clamp(max=rule.target_probs.shape[1] - 1)
    target_probs = rule.target_probs[torch.arange(step.shape[0], device=step.device), step]
    weights = residual_weights(target_probs, rule.draft_probs[requests, step], factor, rule.vocabulary)
    recovered = draw(weights, rule.seed_lo, rule.seed_hi, rule.positions + count.to(torch.int32))
    final[requests] = torch.where(count < num_draft_tokens[requests], recovered, final[requests])


def _probs_of_drafts(drafts: torch.Tensor, rule: SampledRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of the drafts int64 [N, K] under target and draft, [N, K] each."""
    target_probs = rule.target_probs.gather(2, drafts[..., None])[..., 0]
    requests, steps = rule.requests.long()[:, None], torch.arange(drafts.shape[1], device=drafts.device)
    if rule.vocabulary is None:
        return target_probs, rule.draft_probs[requests, steps, drafts]
    ids = rule.vocabulary.draft_ids[drafts].long()
    return target_probs, rule.draft_probs[requests, steps, ids.clamp(min=0)].where(ids >= 0, 0)


def _residual_masses(prefixes: torch.Tensor, rule: SampledRule) -> torch.Tensor:
    """Z_i for i = 1..K in column i - 1; 0 for i = K, which is the last draft of any row that has it."""
    masses = torch.zeros_like(prefixes[:, 1:])
    requests = rule.requests.long()
    for step in range(1, masses.shape[1]):
        masses[:, step - 1] = residual_mass(
            rule.target_probs[:, step], rule.draft_probs[requests, step], prefixes[:, step], rule.vocabulary
        )
    return masses
