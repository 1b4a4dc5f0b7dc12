"""`sonar_kernels.accept` in Triton: one program a batch row decides, one a row under the token rule recovers."""

# mypy: allow-untyped-defs
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl

from sonar_kernels.accept import TokenRule
from sonar_kernels.triton_kernels.noise import exponential

BLOCK = 2048


@triton.jit
def accept_kernel(
    draft_tokens,
    num_draft_tokens,
    sample_indptr,
    target_tokens,
    num_emitted,
    tokens,
    rule_rows,  # int32 [D], which row of the token rule's inputs, -1 = match rule
    target_probs,
    draft_probs,
    accept_coins,
    draft_stride,
    draft_probs_stride,
    draft_probs_step_stride,
    num_decode,
    width,
    vocab_size,
    HAS_RULE: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a power of 2 above width
):
    row = tl.program_id(0)
    first = tl.load(sample_indptr + row)
    sampled = tl.load(sample_indptr + row + 1) > first
    num_drafts = tl.load(num_draft_tokens + row, mask=row < num_decode, other=0)
    steps = tl.arange(0, BLOCK_K)
    drafted = steps < num_drafts
    drafts = tl.load(draft_tokens + row.to(tl.int64) * draft_stride + steps, mask=drafted, other=-1)
    accepted = drafts == tl.load(target_tokens + first + steps, mask=drafted, other=-1)
    if HAS_RULE:
        rule_row = tl.load(rule_rows + row, mask=row < num_decode, other=-1)
        ruled = steps < tl.where(rule_row >= 0, num_drafts, 0)
        places = rule_row.to(tl.int64) * width + steps
        target = tl.load(target_probs + places * vocab_size + drafts, mask=ruled, other=0.0)
        draft_probs += row.to(tl.int64) * draft_probs_stride
        draft = tl.load(draft_probs + steps * draft_probs_step_stride + drafts, mask=ruled, other=1.0)
        coins = tl.load(accept_coins + places, mask=ruled, other=0.0)
        accepted = tl.where(rule_row >= 0, coins * draft < target, accepted)
    num_accepted = tl.min(tl.where(drafted & accepted, BLOCK_K, steps), axis=0)
    final = tl.load(target_tokens + first + num_accepted, mask=sampled, other=-1)
    emitted = tl.where(steps < num_accepted, drafts, tl.where(steps == num_accepted, final, -1))
    tl.store(tokens + row * (width + 1) + steps, emitted, mask=steps <= width)
    tl.store(num_emitted + row, tl.where(sampled, num_accepted + 1, 0))


@triton.jit
def recover_kernel(
    requests,
    num_draft_tokens,
    num_emitted,
    tokens,
    target_probs,
    draft_probs,
    seed_lo,
    seed_hi,
    positions,
    draft_probs_stride,
    draft_probs_step_stride,
    width,
    vocab_size,
    BLOCK: tl.constexpr,
):
    rule_row = tl.program_id(0)
    row = tl.load(requests + rule_row)
    step = tl.load(num_emitted + row) - 1
    if step < tl.load(num_draft_tokens + row):
        lo = tl.load(seed_lo + rule_row)
        hi = tl.load(seed_hi + rule_row)
        position = tl.load(positions + rule_row) + step
        target_probs += (rule_row.to(tl.int64) * width + step) * vocab_size
        draft_probs += row.to(tl.int64) * draft_probs_stride + step * draft_probs_step_stride
        best, best_target = 0.0, -1.0  # of the residual, and of the target where no residual is left
        token, token_of_target = 0, 0
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            inside = ids < vocab_size
            target = tl.load(target_probs + ids, mask=inside, other=0.0)
            draft = tl.load(draft_probs + ids, mask=inside, other=0.0)
            noise = exponential(ids, lo, hi, position)
            scores = tl.where(inside, tl.maximum(target - draft, 0.0) / noise, -1.0)
            block_best, block_token = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
            token = tl.where(block_best > best, start + block_token, token)
            best = tl.maximum(best, block_best)
            scores = tl.where(inside, target / noise, -1.0)
            block_best, block_token = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
            token_of_target = tl.where(block_best > best_target, start + block_token, token_of_target)
            best_target = tl.maximum(best_target, block_best)
        tl.store(tokens + row * (width + 1) + step, tl.where(best > 0.0, token, token_of_target))


def accept_triton(
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    sample_indptr: torch.Tensor,
    target_tokens: torch.Tensor,
    token_rule: TokenRule | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and result as in `sonar_kernels.accept`."""
    num_reqs, (num_decode, width) = num_draft_tokens.shape[0], draft_tokens.shape
    num_emitted = torch.empty(num_reqs, dtype=torch.int32, device=draft_tokens.device)
    tokens = torch.empty((num_reqs, width + 1), dtype=torch.int32, device=draft_tokens.device)
    draft_tokens = draft_tokens if draft_tokens.stride(1) == 1 else draft_tokens.contiguous()
    arguments = (draft_tokens, num_draft_tokens, sample_indptr, target_tokens, num_emitted, tokens)
    block_k = triton.next_power_of_2(width + 1)
    if token_rule is None:
        accept_kernel[(num_reqs,)](
            *arguments, *(target_tokens,) * 4, draft_tokens.stride(0), 0, 0, num_decode, width, 0, False, block_k
        )
        return num_emitted, tokens
    rule = token_rule
    probs = rule.target_probs.contiguous()
    draft_probs = rule.draft_probs if rule.draft_probs.stride(2) == 1 else rule.draft_probs.contiguous()
    strides, vocab_size = draft_probs.stride()[:2], probs.shape[2]
    rule_rows = torch.full((num_decode,), -1, dtype=torch.int32, device=draft_tokens.device)
    num_rules = rule.requests.shape[0]
    rule_rows[rule.requests.long()] = torch.arange(num_rules, dtype=torch.int32, device=draft_tokens.device)
    inputs = (rule_rows, probs, draft_probs, rule.accept_coins.contiguous())
    accept_kernel[(num_reqs,)](
        *arguments, *inputs, draft_tokens.stride(0), *strides, num_decode, width, vocab_size, True, block_k
    )
    seeds = [vector.contiguous() for vector in (rule.seed_lo, rule.seed_hi, rule.positions)]
    recover_kernel[(num_rules,)](
        rule.requests.contiguous(), num_draft_tokens, num_emitted, tokens, probs, draft_probs, *seeds, *strides, width,
        vocab_size, BLOCK=BLOCK,
    )  # fmt: skip
    return num_emitted, tokens
