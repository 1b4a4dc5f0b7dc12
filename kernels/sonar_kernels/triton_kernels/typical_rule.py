"""`sonar_kernels.typical_rule` (lossy) in Triton: one program a draft, one pass over the vocabulary."""

# mypy: allow-untyped-defs
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl

from sonar_kernels.typical_rule import TypicalRule

BLOCK = 2048


@triton.jit
def judge_typical_kernel(
    requests,
    num_draft_tokens,
    draft_tokens,
    target_probs,
    accepted,
    posterior_threshold,
    posterior_alpha,
    draft_stride,
    width,
    vocab_size,
    BLOCK: tl.constexpr,
):
    rule_row = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    row = tl.load(requests + rule_row).to(tl.int64)
    if step < tl.load(num_draft_tokens + row):
        target_probs += (rule_row * width + step) * vocab_size
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            target = tl.load(target_probs + ids, mask=ids < vocab_size, other=1.0)
            sums += tl.where(target > 0.0, target * tl.log(tl.where(target > 0.0, target, 1.0)), 0.0)
        threshold = tl.minimum(posterior_alpha * tl.exp(tl.sum(sums, axis=0)), posterior_threshold)
        target = tl.load(target_probs + tl.load(draft_tokens + row * draft_stride + step))
        tl.store(accepted + rule_row * width + step, (target > threshold).to(tl.int32))


def judge_typical(draft_tokens: torch.Tensor, num_draft_tokens: torch.Tensor, rule: TypicalRule) -> torch.Tensor:
    """Whether each draft passes, int32 [N, K], undefined at or beyond a row's number of drafts."""
    probs = rule.target_probs.contiguous()
    accepted = torch.empty(probs.shape[:2], dtype=torch.int32, device=probs.device)
    judge_typical_kernel[tuple(accepted.shape)](
        rule.requests.contiguous(), num_draft_tokens, draft_tokens, probs, accepted, rule.posterior_threshold,
        rule.posterior_alpha, draft_tokens.stride(0), *probs.shape[1:], BLOCK=BLOCK,
    )  # fmt: skip
    return accepted
