"""Log-probabilities of prompts: what the target's pass over a prompt gave each token of it, from raw logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sonar_engine.device import to_device
from sonar_engine.sampling.logprobs import LogprobTensors, logprobs_of
from sonar_engine.step_buffers import BatchMetadata
from sonar_engine.types import SamplingParams

_PIECE = 64  # positions whose logits are held at once


@dataclass(frozen=True)
class PromptSpans:
    """The stretches of prompts that one step has scored. R = requests with one, in the order of the batch."""

    request_ids: np.ndarray  # int64 [R]
    firsts: np.ndarray  # int32 [R], entry 0 is that of a prompt's second token
    lengths: np.ndarray  # int32 [R]
    width: int  # top entries of the widest request, at least 1


@dataclass(frozen=True)
class PromptScores:
    """N = positions of all spans."""

    spans: PromptSpans
    entries: LogprobTensors  # [N]


class PromptScorer:
    """Knows by slot whose prompt is to be scored. Steps without such a prompt cost a look at their slots."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._widths = np.full(max_num_seqs, -1, np.int32)  # -1: not asked for
        self._lens = np.zeros(max_num_seqs, np.int64)
        self._owners = np.zeros(max_num_seqs, np.int64)

    def admit(self, slot: int, request_id: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        self._widths[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self._lens[slot] = num_prompt_tokens
        self._owners[slot] = request_id

    def score(
        self,
        batch: BatchMetadata,
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> PromptScores | None:
        """None when no row of the batch has a prompt to score. hidden [T, H]; `logits_of` as `ModelRunner.logits`."""
        host = batch.host
        slots = host["slots"]
        asking = np.flatnonzero(self._widths[slots] >= 0)
        if asking.size == 0:
            return None
        firsts, starts, ends = host["num_computed_tokens"][asking], host["qo_indptr"][asking], host["qo_indptr"][1:]
        lengths = np.minimum(ends[asking] - starts, self._lens[slots[asking]] - 1 - firsts)
        kept = np.flatnonzero(lengths > 0)
        if kept.size == 0:
            return None
        asking, firsts, starts, lengths = asking[kept], firsts[kept], starts[kept], lengths[kept]
        width = min(max(int(self._widths[slots[asking]].max()), 1), self._vocab_size)
        spans = PromptSpans(self._owners[slots[asking]], firsts, lengths.astype(np.int32), width)
        rows = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        index = to_device(rows.astype(np.int32), hidden.device)
        tokens = _following(batch)
        pieces = [logprobs_of(logits_of(hidden, piece), tokens[piece.long()], width) for piece in index.split(_PIECE)]
        return PromptScores(spans, LogprobTensors(*map(torch.cat, zip(*pieces, strict=True))))


def _following(batch: BatchMetadata) -> torch.Tensor:
    """The token behind each of the batch's tokens, int64 [T]; of no meaning where a row's prompt ends."""
    following = torch.roll(batch.token_ids, -1).long()
    last = batch.qo_indptr[1:].long() - 1
    following[last] = batch.next_prompt_token.long().clamp(min=0)
    return following
