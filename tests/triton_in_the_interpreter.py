"""Run as a program with TRITON_INTERPRET=1: every Triton kernel against its torch twin, on random mixed batches.

Prints one line a kernel, or ends with the first difference. A process of its own, since Triton reads the variable
when it is imported.
"""

from __future__ import annotations

import torch
from sonar_kernels import coins
from sonar_kernels.accept import TokenRule, accept_torch
from sonar_kernels.draft_tokens import fill_draft_tokens_torch
from sonar_kernels.gumbel import gumbel_argmax_torch
from sonar_kernels.pages import build_page_indices_torch, update_page_table
from sonar_kernels.triton_kernels.accept import accept_triton
from sonar_kernels.triton_kernels.gumbel import gumbel_argmax_triton
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


def token_rule(
    random: torch.Generator, num_drafts: torch.Tensor, width: int, vocab_size: int, draft_probs: torch.Tensor
) -> TokenRule:
    ruled = torch.nonzero((num_drafts > 0) & (torch.rand(num_drafts.shape, generator=random) < 0.6))[:, 0].to(INT32)
    size = ruled.shape[0]
    target = (torch.randn(size, width, vocab_size, generator=random) * 2).softmax(dim=2)
    if size > 1:
        target[0] = draft_probs[int(ruled[0])]  # accepted with certainty
        target[1, :, ::2] = 0
    coins_ = torch.rand(size, width, generator=random)
    coins_[:, -1:] = 0
    seeds = (words(random, size), words(random, size), counts(random, 500, size))
    return TokenRule(ruled, target, draft_probs, coins_, *seeds)


def check_accept(random: torch.Generator) -> None:
    for trial in range(15):
        width, vocab_size = 1 + trial % 5, (4, 2500)[trial % 2]
        num_decode, num_chunks = 9, trial % 3
        num_drafts = counts(random, width, num_decode)
        none = torch.zeros(num_chunks, dtype=INT32)
        sample_indptr = indptr(torch.cat([num_drafts + 1, counts(random, 1, num_chunks)]))
        targets = torch.randint(0, 4, (int(sample_indptr[-1]),), generator=random).to(INT32)
        wide = torch.randint(0, 4, (num_decode, width + 1), generator=random).to(INT32)
        draft_probs = (torch.randn(num_decode, width + 2, vocab_size, generator=random) * 2).softmax(dim=2)
        rule = token_rule(random, num_drafts, width, vocab_size, draft_probs[:, :width])
        arguments = (wide[:, :width], torch.cat([num_drafts, none]), sample_indptr, targets)
        for each in (None, rule):
            got, wanted = accept_triton(*arguments, each), accept_torch(*arguments, each)
            assert torch.equal(got[0], wanted[0]), (trial, got[0], wanted[0])
            assert torch.equal(got[1], wanted[1]), (trial, got[1], wanted[1])


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


if __name__ == "__main__":
    for check in (check_gumbel, check_accept, check_packed, check_noise):
        check(torch.Generator().manual_seed(7))
        print(check.__name__)
