"""Putting draft tokens into the packed batch."""

from __future__ import annotations

import torch


def fill_draft_tokens(
    token_ids: torch.Tensor, token_reqs: torch.Tensor, qo_indptr: torch.Tensor, draft_tokens: torch.Tensor
) -> None:
    """Writes drafts where `token_ids` [T] is negative, in place: token j of row r (j >= 1) gets draft_tokens[r, j - 1].

    token_reqs int32 [T], qo_indptr int32 [R + 1], draft_tokens int32 [D, K]; only the first D rows hold drafts.
    """
    if token_ids.is_cuda:
        from sonar_kernels.triton_kernels.packed import fill_draft_tokens_triton

        fill_draft_tokens_triton(token_ids, token_reqs, qo_indptr, draft_tokens)
    else:
        fill_draft_tokens_torch(token_ids, token_reqs, qo_indptr, draft_tokens)


def fill_draft_tokens_torch(
    token_ids: torch.Tensor, token_reqs: torch.Tensor, qo_indptr: torch.Tensor, draft_tokens: torch.Tensor
) -> None:
    """The torch twin of `fill_draft_tokens`."""
    num_decode, width = draft_tokens.shape
    if num_decode == 0 or width == 0:
        return
    steps = torch.arange(token_ids.shape[0], device=token_ids.device) - qo_indptr[token_reqs] - 1
    drafts = draft_tokens[token_reqs.clamp(max=num_decode - 1), steps.clamp_(0, width - 1)]
    token_ids.copy_(torch.where(token_ids < 0, drafts, token_ids))
