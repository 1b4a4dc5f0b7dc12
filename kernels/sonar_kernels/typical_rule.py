"""Typical acceptance of drafts: lossy, since the law of the text is no longer the target's. In torch.

N = rows under the rule, K = most drafts of any row, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sonar_kernels.sampled_rule import leading_accepted


@dataclass(frozen=True)
class TypicalRule:
    """Lossy. A draft is accepted if target prob > min(posterior_threshold, posterior_alpha * exp(-entropy)).

    Cai et al. 2024, arXiv 2401.10774, section 2.3.1; the entropy is that of the target's distribution at the draft's
    position, in nats. What the drafts were drawn from does not matter; no coins are used.
    """

    requests: torch.Tensor  # int32 [N], batch rows with drafts, each once
    target_probs: torch.Tensor  # fp32 [N, K, V], the target's distribution at each draft's position
    posterior_threshold: float
    posterior_alpha: float


def count_typical(draft_tokens: torch.Tensor, num_draft_tokens: torch.Tensor, rule: TypicalRule) -> torch.Tensor:
    """Accepted drafts int64 [N]."""
    requests = rule.requests.long()
    steps = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    drafted = steps < num_draft_tokens[requests, None]
    drafts = draft_tokens[requests].long().where(drafted, 0)
    target_probs = rule.target_probs.gather(2, drafts[..., None])[..., 0]
    return leading_accepted((target_probs > typical_threshold(rule)) & drafted)


def typical_threshold(rule: TypicalRule) -> torch.Tensor:
    """[N, K], above 0."""
    entropy = torch.special.entr(rule.target_probs).sum(dim=2)
    return (entropy.neg_().exp_() * rule.posterior_alpha).clamp_(max=rule.posterior_threshold)
