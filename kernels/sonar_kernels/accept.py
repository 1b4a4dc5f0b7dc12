"""Acceptance of a chain of drafts: sample and match, token and block verification, mixed in one batch.

R = batch rows, D = decode rows (the first D of them), K = most drafts of any row, S = sampled rows.
"""

from __future__ import annotations

import torch

from sonar_kernels.sampled_rule import SampledRule, count_accepted, leading_accepted, put_recovered_tokens
from sonar_kernels.typical_rule import TypicalRule, count_typical

Rule = SampledRule | TypicalRule


def accept(
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    sample_indptr: torch.Tensor,
    target_tokens: torch.Tensor,
    rule: Rule | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """draft_tokens int32 [D, K], num_draft_tokens [R], sample_indptr [R + 1], target_tokens int32 [S].

    `target_tokens` holds the target's own choice at every verified position. A row that `rule` does not name goes by
    sample and match: a draft is accepted while it equals that choice. A row ends with the bonus token, the target's
    choice after the last draft, where all drafts were accepted, else with the recovered token: drawn from the residual
    under a `SampledRule`, else the target's choice at that position.

    Returns num_emitted int32 [R] (0 for a row without sampled rows, else accepted drafts + 1) and tokens
    int32 [R, K + 1] (-1 beyond num_emitted).
    """
    if target_tokens.is_cuda:
        from sonar_kernels.triton_kernels.accept import accept_triton

        return accept_triton(draft_tokens, num_draft_tokens, sample_indptr, target_tokens, rule)
    return accept_torch(draft_tokens, num_draft_tokens, sample_indptr, target_tokens, rule)


def accept_torch(
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    sample_indptr: torch.Tensor,
    target_tokens: torch.Tensor,
    rule: Rule | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch twin of `accept`."""
    num_reqs, (num_decode, width) = num_draft_tokens.shape[0], draft_tokens.shape
    steps = torch.arange(width, device=draft_tokens.device)
    last_row = target_tokens.shape[0] - 1
    rows = (sample_indptr[:num_decode, None] + steps).clamp_(max=last_row)
    accepted = (target_tokens[rows] == draft_tokens) & (steps < num_draft_tokens[:num_decode, None])
    num_accepted = torch.zeros(num_reqs, dtype=torch.int32, device=draft_tokens.device)
    num_accepted[:num_decode] = leading_accepted(accepted)
    count = factor = num_accepted
    if isinstance(rule, SampledRule):
        count, factor = count_accepted(draft_tokens, num_draft_tokens, rule)
    elif rule is not None:
        count = count_typical(draft_tokens, num_draft_tokens, rule)
    if rule is not None:
        num_accepted[rule.requests.long()] = count.to(torch.int32)

    tokens = torch.full((num_reqs, width + 1), -1, dtype=torch.int32, device=draft_tokens.device)
    tokens[:num_decode, :width] = draft_tokens.where(steps < num_accepted[:num_decode, None], -1)
    final = target_tokens[(sample_indptr[:-1] + num_accepted).clamp_(max=last_row)]
    if isinstance(rule, SampledRule):
        put_recovered_tokens(final, count, factor, num_draft_tokens, rule)
    sampled = sample_indptr.diff() > 0
    tokens.scatter_(1, num_accepted[:, None].long(), final.where(sampled, -1)[:, None])
    return (num_accepted + 1) * sampled, tokens
