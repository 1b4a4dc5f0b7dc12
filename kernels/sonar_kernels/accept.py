"""Acceptance of a chain of drafts: the match rule and the token rule, mixed in one batch.

R = batch rows, D = decode rows (the first D of them), K = most drafts of any row, S = sampled rows, V = vocabulary,
N = rows under the token rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sonar_kernels import coins


@dataclass(frozen=True)
class TokenRule:
    """What token verification needs beside the drafts (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1).

    Entries at or beyond a row's number of drafts are ignored.
    """

    requests: torch.Tensor  # int32 [N], batch rows below D, each once
    target_probs: torch.Tensor  # fp32 [N, K, V], the target's distribution at each draft's position
    draft_probs: torch.Tensor  # fp32 [D, K, V], what each draft was drawn from
    accept_coins: torch.Tensor  # fp32 [N, K], uniform in [0, 1)
    seed_lo: torch.Tensor  # int32 [N], seeds of the recovered token's noise
    seed_hi: torch.Tensor  # int32 [N]
    positions: torch.Tensor  # int32 [N], output position of the first draft


def accept(
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    sample_indptr: torch.Tensor,
    target_tokens: torch.Tensor,
    token_rule: TokenRule | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """draft_tokens int32 [D, K], num_draft_tokens [R], sample_indptr [R + 1], target_tokens int32 [S].

    `target_tokens` holds the target's own choice at every verified position. Under the match rule a draft is accepted
    while it equals that choice; under the token rule while coin * draft prob < target prob. After the first rejection
    the row ends with the recovered token (match: the target's choice; token: drawn from the residual), after a full
    acceptance with the bonus token, the target's choice at the last position.

    Returns num_emitted int32 [R] (0 for a row without sampled rows, else accepted drafts + 1) and tokens
    int32 [R, K + 1] (-1 beyond num_emitted).
    """
    if target_tokens.is_cuda:
        from sonar_kernels.triton_kernels.accept import accept_triton

        return accept_triton(draft_tokens, num_draft_tokens, sample_indptr, target_tokens, token_rule)
    return accept_torch(draft_tokens, num_draft_tokens, sample_indptr, target_tokens, token_rule)


def accept_torch(
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    sample_indptr: torch.Tensor,
    target_tokens: torch.Tensor,
    token_rule: TokenRule | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch twin of `accept`."""
    num_reqs, (num_decode, width) = num_draft_tokens.shape[0], draft_tokens.shape
    steps = torch.arange(width, device=draft_tokens.device)
    last_row = target_tokens.shape[0] - 1
    rows = (sample_indptr[:num_decode, None] + steps).clamp_(max=last_row)
    accepted = target_tokens[rows] == draft_tokens
    if token_rule is not None:
        accepted[token_rule.requests.long()] = _token_rule_accepts(draft_tokens, token_rule)
    accepted &= steps < num_draft_tokens[:num_decode, None]
    num_accepted = torch.zeros(num_reqs, dtype=torch.int32, device=draft_tokens.device)
    num_accepted[:num_decode] = accepted.cumprod(dim=1).sum(dim=1)

    tokens = torch.full((num_reqs, width + 1), -1, dtype=torch.int32, device=draft_tokens.device)
    tokens[:num_decode, :width] = draft_tokens.where(steps < num_accepted[:num_decode, None], -1)
    final = target_tokens[(sample_indptr[:-1] + num_accepted).clamp_(max=last_row)]
    if token_rule is not None:
        _put_recovered_tokens(final, num_accepted, num_draft_tokens, token_rule)
    sampled = sample_indptr.diff() > 0
    tokens.scatter_(1, num_accepted[:, None].long(), final.where(sampled, -1)[:, None])
    return (num_accepted + 1) * sampled, tokens


def token_rule_accepts(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, accept_coins: torch.Tensor
) -> torch.Tensor:
    """Whether each draft is accepted, from its probabilities under target and draft: coin < target / draft.

    The comparison is strict and free of division, so that a target probability of 0 rejects even at a coin of 0.
    """
    return accept_coins * draft_probs < target_probs


def residual_weights(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Unnormalised law of the recovered token: max(target - draft, 0), or target where that is zero everywhere."""
    weights = (target_probs - draft_probs).clamp_(min=0)
    return torch.where(weights.sum(dim=-1, keepdim=True) > 0, weights, target_probs)


def _token_rule_accepts(draft_tokens: torch.Tensor, rule: TokenRule) -> torch.Tensor:  # bool [N, K]
    requests = rule.requests.long()
    drafts = draft_tokens[requests].long().clamp_(min=0)[..., None]
    target_probs = rule.target_probs.gather(2, drafts)[..., 0]
    draft_probs = rule.draft_probs[requests].gather(2, drafts)[..., 0]
    return token_rule_accepts(target_probs, draft_probs, rule.accept_coins)


def _put_recovered_tokens(
    final: torch.Tensor, num_accepted: torch.Tensor, num_draft_tokens: torch.Tensor, rule: TokenRule
) -> None:
    """Overwrites `final` [R] where a row under the token rule rejected a draft."""
    requests = rule.requests.long()
    count = num_accepted[requests]
    step = count.clamp(max=rule.target_probs.shape[1] - 1).long()
    target_probs = rule.target_probs[torch.arange(step.shape[0], device=step.device), step]
    weights = residual_weights(target_probs, rule.draft_probs[requests, step])
    ids = torch.arange(weights.shape[1], dtype=torch.int32, device=weights.device)
    noise = coins.exponential(ids, rule.seed_lo[:, None], rule.seed_hi[:, None], (rule.positions + count)[:, None])
    recovered = (weights / noise).argmax(dim=1).to(torch.int32)
    final[requests] = torch.where(count < num_draft_tokens[requests], recovered, final[requests])
