"""Run as a program with TRITON_INTERPRET=1: every Triton kernel against its torch twin, on random mixed batches.

Prints one line a kernel, or ends with the first difference. A process of its own, since Triton reads the variable
when it is imported.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from exact_law import Outcomes, Setting, emitted_law, error_of, random_tree, recorded_weights, with_zeros
from sonar_kernels import DraftVocabulary, SampledRule, TypicalRule, coins
from sonar_kernels.accept import accept_torch
from sonar_kernels.draft_tokens import fill_draft_tokens_torch
from sonar_kernels.gumbel import gumbel_argmax_torch
from sonar_kernels.pages import build_page_indices_torch, update_page_table
from sonar_kernels.rows import copy_rows
from sonar_kernels.shift_tokens import shift_tokens_torch
from sonar_kernels.triton_kernels.accept import accept_triton
from sonar_kernels.triton_kernels.gumbel import gumbel_argmax_triton
from sonar_kernels.triton_kernels.head_input import copy_rows_triton, shift_tokens_triton
from sonar_kernels.triton_kernels.packed import (
    build_page_indices_triton,
    fill_draft_tokens_triton,
    update_page_table_triton,
)

INT32 = torch.int32


def words(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=random).to(INT32)


def counts(random: torch.Generator, most: int, size: int) -> torch.Tensor:
    return torch.randint(0, most + 1, (size,), generator=random).to(INT32)


def indptr(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=INT32), lengths.cumsum(0).to(INT32)])


def check_gumbel(random: torch.Generator) -> None:
    for vocab_size in (3, 257, 5000):  # within a block, and over several
        rows = 24
        logits = torch.randn(rows, vocab_size, generator=random) * 2
        logits[:, 0] = -torch.inf
        logits[5] = logits[5].round()  # ties
        inv_temperature = torch.tensor([0.0, 0.5, 1.0, 2.0]).repeat(rows // 4)
        arguments = (logits, inv_temperature, words(random, rows), words(random, rows), counts(random, 99, rows))
        assert torch.equal(gumbel_argmax_triton(*arguments), gumbel_argmax_torch(*arguments))


def some_rows(random: torch.Generator, num_drafts: torch.Tensor) -> torch.Tensor:
    return torch.nonzero((num_drafts > 0) & (torch.rand(num_drafts.shape, generator=random) < 0.6))[:, 0].to(INT32)


def reduced_vocabulary(random: torch.Generator, vocab_size: int) -> DraftVocabulary:
    """All ids that drafts use, and half of the rest, in any order."""
    rest = 4 + torch.randperm(vocab_size - 4, generator=random)[: (vocab_size - 4) // 2]
    chosen = torch.cat([torch.arange(4), rest])
    target_ids = chosen[torch.randperm(chosen.shape[0], generator=random)]
    draft_ids = torch.full((vocab_size,), -1, dtype=INT32)
    draft_ids[target_ids] = torch.arange(target_ids.shape[0], dtype=INT32)
    return DraftVocabulary(target_ids.to(INT32), draft_ids)


def sampled_rule(
    random: torch.Generator, num_drafts: torch.Tensor, width: int, vocab_size: int, reduced: bool
) -> SampledRule:
    """Rows of block and token verification, some with laws that are equal, zero in places, or without a residual."""
    vocabulary = reduced_vocabulary(random, vocab_size) if reduced else None
    num_ids = vocab_size if vocabulary is None else vocabulary.target_ids.shape[0]
    draft = (torch.randn(num_drafts.shape[0], width + 2, num_ids, generator=random) * 2).softmax(dim=2)[:, :width]
    ruled = some_rows(random, num_drafts)
    size = ruled.shape[0]
    target = (torch.randn(size, width, vocab_size, generator=random) * 2).softmax(dim=2)
    if size > 2:
        if vocabulary is None:
            target[0] = draft[int(ruled[0])]  # accepted with certainty
        target[1, :, ::2] = 0
        target[2] /= 1e4  # no residual
    coins_ = torch.rand(size, width, generator=random)
    coins_[:, -1:] = 0
    seeds = (words(random, size), words(random, size), counts(random, 500, size))
    block = torch.rand(size, generator=random) < 0.7
    return SampledRule(ruled, block, target, draft, coins_, *seeds, vocabulary)


def typical_rule(random: torch.Generator, num_drafts: torch.Tensor, width: int, vocab_size: int) -> TypicalRule:
    ruled = some_rows(random, num_drafts)
    target = (torch.randn(ruled.shape[0], width, vocab_size, generator=random) * 3).softmax(dim=2)
    target[:1, :, 1::2] = 0
    return TypicalRule(ruled, target, 0.3, 0.5)


def check_accept(random: torch.Generator) -> None:
    """Rows of every kind and of mixed lengths, with prefill rows that sample or do not."""
    for trial in range(10):
        width, vocab_size = 1 + trial % 5, (6, 2500)[trial % 2]
        num_decode, num_chunks = 9, trial % 3
        num_drafts = counts(random, width, num_decode)
        none = torch.zeros(num_chunks, dtype=INT32)
        sample_indptr = indptr(torch.cat([num_drafts + 1, counts(random, 1, num_chunks)]))
        targets = torch.randint(0, 4, (int(sample_indptr[-1]),), generator=random).to(INT32)
        wide = torch.randint(0, 4, (num_decode, width + 1), generator=random).to(INT32)
        arguments = (wide[:, :width], torch.cat([num_drafts, none]), sample_indptr, targets)
        rules = (
            None,
            sampled_rule(random, num_drafts, width, vocab_size, reduced=False),
            sampled_rule(random, num_drafts, width, vocab_size, reduced=True),
            typical_rule(random, num_drafts, width, vocab_size),
        )
        for rule in rules:
            got, wanted = accept_triton(*arguments, rule), accept_torch(*arguments, rule)
            assert torch.equal(got[0], wanted[0]), (trial, rule, got[0], wanted[0])
            assert torch.equal(got[1], wanted[1]), (trial, rule, got[1], wanted[1])


def check_law(random: torch.Generator) -> None:
    """Every draft and every outcome over a vocabulary of 3: the kernels' decisions give exactly the target's law."""
    for length, block, draft_ids in ((3, True, None), (2, False, None), (2, True, (2, 0))):
        target, draft = random_tree(length + 1, 0), random_tree(length + 1, 50)
        draft = draft if draft_ids is None else with_zeros(draft, 1)
        setting = Setting(target, draft, length, block, draft_ids)
        outcomes = Outcomes.of(setting)
        with recorded_weights() as residuals:
            setting.run(outcomes.drafts, outcomes.coins)
        in_single = replace(setting, dtype=torch.float32)
        got = replace(in_single, accept=accept_triton).run(outcomes.drafts, outcomes.coins)
        assert error_of(emitted_law(setting, outcomes, got[0], residuals[0]), target) < 1e-12
        assert torch.equal(got[1], in_single.run(outcomes.drafts, outcomes.coins)[1])


def check_packed(random: torch.Generator) -> None:
    num_drafts = counts(random, 4, 40)
    qo_indptr = indptr(torch.cat([num_drafts + 1, torch.tensor([300, 1], dtype=INT32)]))
    reqs = torch.repeat_interleave(torch.arange(42), qo_indptr.diff().long()).to(INT32)
    steps = torch.arange(reqs.shape[0]) - qo_indptr[reqs]
    token_ids = torch.where((steps > 0) & (reqs < 40), -1, torch.arange(reqs.shape[0])).to(INT32)
    drafts = words(random, 40, 5).abs()
    got, wanted = token_ids.clone(), token_ids.clone()
    fill_draft_tokens_triton(got, reqs, qo_indptr, drafts)
    fill_draft_tokens_torch(wanted, reqs, qo_indptr, drafts)
    assert torch.equal(got, wanted)

    places = torch.randperm(20 * 600, generator=random)[:700]
    new = ((places // 600).to(INT32), (places % 600).to(INT32), words(random, 700))
    got, wanted = torch.zeros(20, 600, dtype=INT32), torch.zeros(20, 600, dtype=INT32)
    update_page_table_triton(got, *new)
    update_page_table(wanted, *new)
    assert torch.equal(got, wanted)

    slots = torch.randperm(20, generator=random)[:8].to(INT32)
    paged_kv_indptr = indptr(torch.cat([counts(random, 600, 7), torch.zeros(1, dtype=INT32)]))
    arguments = (wanted, slots, paged_kv_indptr, int(paged_kv_indptr[-1]))
    assert torch.equal(build_page_indices_triton(*arguments), build_page_indices_torch(*arguments))


def check_noise(random: torch.Generator) -> None:
    """Scores of a row of equal logits are the noise itself, so the winner is the smallest exponential."""
    ids = torch.arange(3000, dtype=INT32)
    lo, hi, positions = words(random, 16), words(random, 16), counts(random, 9, 16)
    noise = coins.exponential(ids, lo[:, None], hi[:, None], positions[:, None])
    chosen = gumbel_argmax_triton(torch.zeros(16, 3000), torch.ones(16), lo, hi, positions)
    assert torch.equal(chosen, noise.argmin(dim=1).to(INT32))


def check_shifted_tokens(random: torch.Generator) -> None:
    """Decode rows with drafts, accepted to any length, beside chunks that end a prompt and chunks that do not."""
    for width in (1, 4):
        num_drafts = torch.cat([counts(random, width - 1, 40), torch.zeros(8, dtype=INT32)])
        q_len = num_drafts + torch.where(torch.arange(48) < 40, 1, 1 + counts(random, 90, 48)).to(INT32)
        samples = torch.where(torch.arange(48) < 44, num_drafts + 1, 0).to(INT32)
        num_emitted = (torch.rand(48, generator=random) * samples).ceil().to(INT32)
        qo_indptr, num_tokens = indptr(q_len), int(q_len.sum())
        emitted = words(random, 48, width).abs()
        emitted[torch.arange(width) >= num_emitted[:, None]] = -1
        arguments = (
            words(random, num_tokens).abs(),
            torch.repeat_interleave(torch.arange(48), q_len.long()).to(INT32),
            qo_indptr,
            indptr(samples),
            torch.where(samples > 0, -1, words(random, 48).abs()).to(INT32),
            emitted,
        )
        assert torch.equal(shift_tokens_triton(*arguments), shift_tokens_torch(*arguments))


def check_copied_rows(random: torch.Generator) -> None:
    for dtype, width in ((torch.float32, 1500), (torch.bfloat16, 30)):
        source = torch.randn(50, width + 7, generator=random).to(dtype)[:, :width]
        rows = torch.randint(0, 50, (20,), generator=random).to(INT32)
        to = torch.randperm(64, generator=random)[:20].to(INT32)
        got, wanted = torch.zeros(64, width, dtype=dtype), torch.zeros(64, width, dtype=dtype)
        copy_rows_triton(source, rows, got, to)
        copy_rows(source, rows, wanted, to)
        assert torch.equal(got, wanted)


CHECKS = (
    check_gumbel,
    check_accept,
    check_law,
    check_packed,
    check_noise,
    check_shifted_tokens,
    check_copied_rows,
)

if __name__ == "__main__":
    for check in CHECKS:
        check(torch.Generator().manual_seed(7))
        print(check.__name__)
