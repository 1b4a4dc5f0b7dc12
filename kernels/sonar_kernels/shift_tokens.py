"""The input of a draft head: the batch's tokens one to the left, with what the target chose put in place."""

# ruff: noqa: PLR0917

from __future__ import annotations

import torch


def shift_tokens(
    token_ids: torch.Tensor,
    token_reqs: torch.Tensor,
    qo_indptr: torch.Tensor,
    sample_indptr: torch.Tensor,
    next_prompt_token: torch.Tensor,
    emitted: torch.Tensor,
) -> torch.Tensor:
    """The token that follows each token of the batch, int32 [T].

    Of a row r that samples s tokens (`sample_indptr` int32 [R + 1]) the last s are followed by what was emitted,
    `emitted` int32 [R, W >= s]: accepted drafts, the target's own token, then -1, which becomes 0: those tokens are
    rejected drafts, and nothing reads their entries. All others are followed by the next token of `token_ids` int32
    [T], the last one of a row that does not sample by `next_prompt_token` int32 [R]. token_reqs int32 [T], qo_indptr
    int32 [R + 1].
    """
    if token_ids.is_cuda:
        from sonar_kernels.triton_kernels.head_input import shift_tokens_triton

        return shift_tokens_triton(token_ids, token_reqs, qo_indptr, sample_indptr, next_prompt_token, emitted)
    return shift_tokens_torch(token_ids, token_reqs, qo_indptr, sample_indptr, next_prompt_token, emitted)


def shift_tokens_torch(
    token_ids: torch.Tensor,
    token_reqs: torch.Tensor,
    qo_indptr: torch.Tensor,
    sample_indptr: torch.Tensor,
    next_prompt_token: torch.Tensor,
    emitted: torch.Tensor,
) -> torch.Tensor:
    """The torch twin of `shift_tokens`."""
    places = torch.arange(token_ids.shape[0], dtype=torch.int32, device=token_ids.device)
    row_ends = qo_indptr[1:]
    num_samples = sample_indptr.diff()
    samples_of = (places - (row_ends - num_samples)[token_reqs]).clamp_(max=emitted.shape[1] - 1)  # < 0: none
    following = torch.where(places + 1 < row_ends[token_reqs], token_ids.roll(-1), next_prompt_token[token_reqs])
    chosen = emitted[token_reqs, samples_of.clamp(min=0)]
    return torch.where(samples_of < 0, following, chosen.clamp(min=0))
