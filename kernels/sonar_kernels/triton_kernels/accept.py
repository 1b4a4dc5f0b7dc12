"""`sonar_kernels.accept` in Triton: one program a batch row counts what was accepted and writes what is emitted."""

# mypy: allow-untyped-defs
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl

from sonar_kernels.accept import Rule
from sonar_kernels.sampled_rule import SampledRule
from sonar_kernels.triton_kernels.sampled_rule import TritonSampledRule
from sonar_kernels.triton_kernels.typical_rule import judge_typical


@triton.jit
def accept_kernel(
    draft_tokens,
    num_draft_tokens,
    sample_indptr,
    target_tokens,
    num_emitted,
    tokens,
    rule_rows,  # int32 [D], which row of the rule's inputs, -1 = sample and match
    block_rows,  # int32 [N], not 0: the longest prefix that passes, else the leading drafts
    judged,  # int32 [N, K], not 0: the draft passes
    draft_stride,
    num_decode,
    width,
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
        passed = tl.load(judged + rule_row.to(tl.int64) * width + steps, mask=ruled, other=0) != 0
        accepted = tl.where(rule_row >= 0, passed, accepted)
    num_accepted = tl.min(tl.where(drafted & accepted, BLOCK_K, steps), axis=0)
    if HAS_RULE:
        longest = tl.max(tl.where(drafted & accepted, steps + 1, 0), axis=0)
        is_block = tl.load(block_rows + rule_row, mask=rule_row >= 0, other=0) != 0
        num_accepted = tl.where(is_block, longest, num_accepted)
    final = tl.load(target_tokens + first + num_accepted, mask=sampled, other=-1)
    emitted = tl.where(steps < num_accepted, drafts, tl.where(steps == num_accepted, final, -1))
    tl.store(tokens + row * (width + 1) + steps, emitted, mask=steps <= width)
    tl.store(num_emitted + row, tl.where(sampled, num_accepted + 1, 0))


def accept_triton(
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    sample_indptr: torch.Tensor,
    target_tokens: torch.Tensor,
    rule: Rule | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and result as in `sonar_kernels.accept`."""
    num_reqs, (num_decode, width) = num_draft_tokens.shape[0], draft_tokens.shape
    num_emitted = torch.empty(num_reqs, dtype=torch.int32, device=draft_tokens.device)
    tokens = torch.empty((num_reqs, width + 1), dtype=torch.int32, device=draft_tokens.device)
    draft_tokens = draft_tokens if draft_tokens.stride(1) == 1 else draft_tokens.contiguous()
    arguments = (draft_tokens, num_draft_tokens, sample_indptr, target_tokens, num_emitted, tokens)
    numbers = (draft_tokens.stride(0), num_decode, width)
    block_k = triton.next_power_of_2(width + 1)
    if rule is None:
        accept_kernel[(num_reqs,)](*arguments, *(target_tokens,) * 3, *numbers, False, block_k)
        return num_emitted, tokens
    rule_rows = torch.full((num_decode,), -1, dtype=torch.int32, device=draft_tokens.device)
    num_rules = rule.requests.shape[0]
    rule_rows[rule.requests.long()] = torch.arange(num_rules, dtype=torch.int32, device=draft_tokens.device)
    if not isinstance(rule, SampledRule):
        judged = judge_typical(draft_tokens, num_draft_tokens, rule)
        leading = torch.zeros_like(rule.requests)
        accept_kernel[(num_reqs,)](*arguments, rule_rows, leading, judged, *numbers, True, block_k)
        return num_emitted, tokens
    launches = TritonSampledRule(rule)
    judged = launches.judge(draft_tokens, num_draft_tokens)
    accept_kernel[(num_reqs,)](*arguments, rule_rows, launches.block_rows, judged, *numbers, True, block_k)
    launches.recover(num_draft_tokens, num_emitted, tokens)
    return num_emitted, tokens
