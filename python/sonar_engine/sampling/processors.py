"""From the target's logits to those that are sampled: what users may ask of them, at every verified position.

The order is vLLM's: the grammar, allowed and banned ids, min_tokens, logit bias, penalties, then (over the
temperature) min-p, top-k, top-p. The logits themselves are left undivided by the temperature: greedy rows want their
argmax, and the sampler divides as it draws.
"""

from __future__ import annotations

import numpy as np
import torch

from sonar_engine.device import to_device
from sonar_engine.sampling import state as s
from sonar_engine.sampling.cuts import TopLimits, cut_min_p, cut_top
from sonar_engine.sampling.state import SampleRows, SamplingState


def process(
    logits: torch.Tensor, rows: SampleRows, state: SamplingState, draft_tokens: torch.Tensor | None
) -> torch.Tensor:
    """logits fp32 [S, V], changed in place and returned; draft_tokens int32 [D, K], the drafts under verification."""
    of_grammars = _mask_by_grammars(logits, rows, draft_tokens) if rows.all_uses & s.GRAMMAR else None
    if rows.all_uses & s.FORBIDDEN:
        _forbid(logits, rows, state)
    if rows.all_uses & s.MIN_TOKENS:
        _forbid_early_ends(logits, rows, state)
    if of_grammars is not None:
        _lift_dead_ends(logits, rows, of_grammars)
    if rows.all_uses & s.BIAS:
        _add_bias(logits, rows, state)
    if rows.all_uses & s.COUNTED:
        _penalise(logits, rows, state, draft_tokens)
    if rows.all_uses & s.MIN_P:
        _cut_min_p(logits, rows, state)
    if rows.all_uses & s.TOP:
        _cut_top(logits, rows, state)
    return logits


class _Asking:
    """The rows that use a feature: `logits` [n, V] to change in place, then `put_back`. No copies where all rows do."""

    def __init__(self, logits: torch.Tensor, rows: SampleRows, bits: int) -> None:
        asking = rows.that_use(bits)
        self._whole = None if len(asking) == len(logits) else logits
        self.index = to_device(asking, logits.device)
        self.logits = logits if self._whole is None else logits[self.index]
        self.host_slots: np.ndarray = rows.host_slots[asking]
        self.slots = rows.slots[self.index]

    def put_back(self) -> None:
        if self._whole is not None:
            self._whole[self.index] = self.logits


def _mask_by_grammars(logits: torch.Tensor, rows: SampleRows, draft_tokens: torch.Tensor | None) -> torch.Tensor | None:
    """The rows with a grammar after it, [n, V], where something else may still forbid all that it left."""
    asking = _Asking(logits, rows, s.GRAMMAR)
    allowed = rows.allowed_by_grammars(draft_tokens).to(logits.device)
    asking.logits.masked_fill_(~allowed, -torch.inf)
    asking.put_back()
    return asking.logits.clone() if rows.all_uses & (s.FORBIDDEN | s.MIN_TOKENS) else None


def _lift_dead_ends(logits: torch.Tensor, rows: SampleRows, of_grammars: torch.Tensor) -> None:
    """Where nothing that a grammar allows was left, it is the grammar that counts."""
    asking = _Asking(logits, rows, s.GRAMMAR)
    dead = asking.logits.amax(dim=1, keepdim=True) == -torch.inf
    asking.logits.copy_(torch.where(dead, of_grammars, asking.logits))
    asking.put_back()


def _forbid(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> None:
    asking = _Asking(logits, rows, s.FORBIDDEN)
    mask = state.forbidden.rows[state.forbidden.index_of(asking.host_slots)]
    asking.logits.masked_fill_(mask, -torch.inf)
    asking.put_back()


def _forbid_early_ends(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> None:
    """Ends are forbidden exactly where the output position is below min_tokens, row by row."""
    asking = _Asking(logits, rows, s.MIN_TOKENS)
    early = rows.positions[asking.index] < state.min_tokens[asking.slots]
    mask = state.ends.rows[state.ends.index_of(asking.host_slots)] & early[:, None]
    asking.logits.masked_fill_(mask, -torch.inf)
    asking.put_back()


def _add_bias(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> None:
    asking = _Asking(logits, rows, s.BIAS)
    ids = state.bias_ids.rows[state.bias_ids.index_of(asking.host_slots)]
    values = state.bias_values.rows[state.bias_values.index_of(asking.host_slots)]
    asking.logits.scatter_add_(1, ids, values)
    asking.put_back()


def _penalise(logits: torch.Tensor, rows: SampleRows, state: SamplingState, draft_tokens: torch.Tensor | None) -> None:
    """Repetition over prompt and output, presence and frequency over the output (arXiv 1909.05858, OpenAI's).

    The output at a row after i drafts includes those drafts: the row only matters if they are accepted.
    """
    asking = _Asking(logits, rows, s.COUNTED)
    counts = state.output_counts.rows[state.output_counts.index_of(asking.host_slots)]  # a copy [n, V]
    if draft_tokens is not None and draft_tokens.numel():
        drafts = draft_tokens[rows.reqs[asking.index].clamp(max=draft_tokens.shape[0] - 1)].long()
        before = torch.arange(drafts.shape[1], device=logits.device) < rows.offsets[asking.index, None]
        counts.scatter_add_(1, drafts.clamp_(min=0), before.to(counts.dtype))
    chosen = asking.logits
    if rows.all_uses & s.REPETITION:
        seen = counts > 0
        seen |= state.in_prompt.rows[state.in_prompt.index_of(asking.host_slots)]
        penalty = torch.where(seen, state.repetition[asking.slots, None], 1.0)
        chosen.copy_(torch.where(chosen > 0, chosen / penalty, chosen * penalty))
    if rows.all_uses & s.PENALTIES:
        chosen.addcmul_(counts, state.frequency[asking.slots, None], value=-1)
        chosen.addcmul_(counts.clamp_(max=1), state.presence[asking.slots, None], value=-1)
    asking.put_back()


def _cut_min_p(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> None:
    asking = _Asking(logits, rows, s.MIN_P)
    cut_min_p(asking.logits, state.inv_temperature[asking.slots], state.log_min_p[asking.slots])
    asking.put_back()


def _cut_top(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> None:
    asking = _Asking(logits, rows, s.TOP)
    slots = asking.slots
    limits = TopLimits(state.inv_temperature[slots], state.top_k[slots], state.top_p[slots])
    cut_top(asking.logits, limits, int(state.host_top_k[asking.host_slots].max()))
    asking.put_back()
