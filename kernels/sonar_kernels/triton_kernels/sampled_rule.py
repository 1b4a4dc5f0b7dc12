"""`sonar_kernels.sampled_rule` in Triton: one program a draft judges it, one a row draws the recovered token."""

# mypy: allow-untyped-defs
# ruff: noqa: PLR0917

import torch
import triton
import triton.language as tl

from sonar_kernels.sampled_rule import SampledRule
from sonar_kernels.triton_kernels.noise import exponential

BLOCK = 2048


@triton.jit
def draft_probs_of(draft_probs, draft_ids, ids, inside, HAS_MAP: tl.constexpr):
    """Draft probabilities of the target's `ids`; 0 where not `inside`, or where the draft has no such id."""
    if HAS_MAP:
        ids = tl.load(draft_ids + ids, mask=inside, other=-1)
        inside = ids >= 0
    return tl.load(draft_probs + ids, mask=inside, other=0.0)


@triton.jit
def residual_mass(target_probs, draft_probs, draft_ids, factor, vocab_size, HAS_MAP: tl.constexpr, BLOCK: tl.constexpr):
    """Sum over the vocabulary of max(factor * target - draft, 0)."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < vocab_size
        target = tl.load(target_probs + ids, mask=inside, other=0.0)
        draft = draft_probs_of(draft_probs, draft_ids, ids, inside, HAS_MAP)
        sums += tl.maximum(target * factor - draft, 0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def judge_kernel(
    requests,
    block_rows,
    num_draft_tokens,
    draft_tokens,
    target_probs,
    draft_probs,
    draft_ids,
    accept_coins,
    accepted,
    factors,  # fp32 [N, K]: of the target's distribution in the residual after draft k
    draft_stride,
    draft_probs_stride,
    draft_probs_step_stride,
    width,
    vocab_size,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rule_row = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    row = tl.load(requests + rule_row).to(tl.int64)
    num_drafts = tl.load(num_draft_tokens + row)
    if step < num_drafts:
        is_block = tl.load(block_rows + rule_row) != 0
        coin = tl.load(accept_coins + rule_row * width + step)
        draft_tokens += row * draft_stride
        target_probs += rule_row * width * vocab_size
        draft_probs += row * draft_probs_stride
        prefix = tl.full((), 1.0, tl.float32)
        passed = tl.full((), False, tl.int1)
        for at in range(0, step + 1):
            token = tl.load(draft_tokens + at)
            target = tl.load(target_probs + at * vocab_size + token)
            draft = draft_probs_of(draft_probs + at * draft_probs_step_stride, draft_ids, token, token >= 0, HAS_MAP)
            passed = coin * draft < target  # under the token rule; the last one counts
            joint = prefix * target
            ratio = joint / tl.where(draft > 0.0, draft, 1.0)
            prefix = tl.where(joint < draft, ratio, tl.where(joint > 0.0, 1.0, 0.0))
        if is_block:
            if step + 1 == num_drafts:
                passed = coin < prefix
            else:
                target_probs += (step + 1) * vocab_size
                draft_probs += (step + 1) * draft_probs_step_stride
                mass = residual_mass(target_probs, draft_probs, draft_ids, prefix, vocab_size, HAS_MAP, BLOCK)
                passed = coin * (mass + (1.0 - prefix)) < mass
        tl.store(accepted + rule_row * width + step, passed.to(tl.int32))
        tl.store(factors + rule_row * width + step, tl.where(is_block, prefix, 1.0))


@triton.jit
def recover_kernel(
    requests,
    num_draft_tokens,
    num_emitted,
    tokens,
    target_probs,
    draft_probs,
    draft_ids,
    factors,
    seed_lo,
    seed_hi,
    positions,
    draft_probs_stride,
    draft_probs_step_stride,
    width,
    vocab_size,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rule_row = tl.program_id(0)
    row = tl.load(requests + rule_row)
    step = tl.load(num_emitted + row) - 1
    if step < tl.load(num_draft_tokens + row):
        lo = tl.load(seed_lo + rule_row)
        hi = tl.load(seed_hi + rule_row)
        position = tl.load(positions + rule_row) + step
        place = rule_row.to(tl.int64) * width + step
        factor = tl.load(factors + place - 1, mask=step > 0, other=1.0)
        target_probs += place * vocab_size
        draft_probs += row.to(tl.int64) * draft_probs_stride + step * draft_probs_step_stride
        best, best_target = 0.0, -1.0  # of the residual, and of the target where no residual is left
        token, token_of_target = 0, 0
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            inside = ids < vocab_size
            target = tl.load(target_probs + ids, mask=inside, other=0.0)
            draft = draft_probs_of(draft_probs, draft_ids, ids, inside, HAS_MAP)
            noise = exponential(ids, lo, hi, position)
            scores = tl.where(inside, tl.maximum(target * factor - draft, 0.0) / noise, -1.0)
            block_best, block_token = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
            token = tl.where(block_best > best, start + block_token, token)
            best = tl.maximum(best, block_best)
            scores = tl.where(inside, target / noise, -1.0)
            block_best, block_token = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
            token_of_target = tl.where(block_best > best_target, start + block_token, token_of_target)
            best_target = tl.maximum(best_target, block_best)
        tl.store(tokens + row * (width + 1) + step, tl.where(best > 0.0, token, token_of_target))


class TritonSampledRule:
    """The launches of one batch's rule, before and after its counts are known."""

    def __init__(self, rule: SampledRule) -> None:
        self._rule = rule
        self.block_rows = rule.block.to(torch.int32)
        self.requests = rule.requests.contiguous()
        self._target_probs = rule.target_probs.contiguous()
        self._draft_probs = rule.draft_probs if rule.draft_probs.stride(2) == 1 else rule.draft_probs.contiguous()
        self._draft_ids = self.requests if rule.vocabulary is None else rule.vocabulary.draft_ids.contiguous()
        self._factors = torch.empty(self._target_probs.shape[:2], dtype=torch.float32, device=self.requests.device)
        strides, (_, width, vocab_size) = self._draft_probs.stride()[:2], self._target_probs.shape
        self._numbers = (*strides, width, vocab_size, rule.vocabulary is not None)

    def judge(self, draft_tokens: torch.Tensor, num_draft_tokens: torch.Tensor) -> torch.Tensor:
        """Whether each draft passes, int32 [N, K], undefined at or beyond a row's number of drafts."""
        accepted = torch.empty(self._factors.shape, dtype=torch.int32, device=draft_tokens.device)
        judge_kernel[tuple(accepted.shape)](
            self.requests, self.block_rows, num_draft_tokens, draft_tokens, self._target_probs, self._draft_probs,
            self._draft_ids, self._rule.accept_coins.contiguous(), accepted, self._factors, draft_tokens.stride(0),
            *self._numbers, BLOCK=BLOCK,
        )  # fmt: skip
        return accepted

    def recover(self, num_draft_tokens: torch.Tensor, num_emitted: torch.Tensor, tokens: torch.Tensor) -> None:
        """Puts the recovered tokens of the rows that rejected a draft into `tokens` [R, K + 1]."""
        seeds = [vector.contiguous() for vector in (self._rule.seed_lo, self._rule.seed_hi, self._rule.positions)]
        recover_kernel[(self.requests.shape[0],)](
            self.requests, num_draft_tokens, num_emitted, tokens, self._target_probs, self._draft_probs,
            self._draft_ids, self._factors, *seeds, *self._numbers, BLOCK=BLOCK,
        )  # fmt: skip
