"""A head over packed texts as it drafts in serving: K passes from every start slot, its own feature fed back.

Pass 1 is over all positions with the target's states. Pass k (from 2) is over the start slots s, at position s + k - 1,
with the text's own token at s + k and the head's feature of pass k - 1. It attends to the keys of pass 1 up to s and to
those that passes 2..k made from the same start slot, which is what a draft finds in the KV cache: nothing of another
draft. (Called training-time test in EAGLE-3, arXiv 2503.01840.)
"""

from __future__ import annotations

import torch

from sonar_engine.drafters.mtp_head import MtpHead
from sonar_engine.training.packing import PackedBatch

# B rows, L positions, M start slots, K passes, H hidden size.


def run_recursion(
    head: MtpHead, embedding: torch.Tensor, batch: PackedBatch, num_steps: int, compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head has for the logits, and its features, of every pass at the start slots: [K, B, M, H] each.

    `embedding` [V, H] is the target's. Where the text ends before draft token k, row k holds nothing of use.
    """
    attention = RecursionAttention(head, batch)
    length, slots = batch.tokens.shape[1], batch.slots
    positions = torch.arange(length, device=slots.device) - batch.text_starts  # [B, L]
    following = torch.roll(batch.tokens, -1, dims=1)
    states = head(
        embedding[following].flatten(0, 1).to(compute),
        batch.hidden.flatten(0, 1).to(compute),
        positions.flatten().int(),
        attention.first,
    )
    for_logits, features = [_at(states.for_logits, batch)], [_at(states.features, batch)]
    for step in range(1, num_steps):
        tokens = batch.tokens.gather(1, (slots + step + 1).clamp(max=length - 1))
        states = head(
            embedding[tokens].flatten(0, 1).to(compute),
            features[-1].flatten(0, 1),
            (positions.gather(1, slots) + step).flatten().int(),
            attention.later,
        )
        for_logits.append(states.for_logits.view(*slots.shape, -1))
        features.append(states.features.view(*slots.shape, -1))
    return torch.stack(for_logits), torch.stack(features)


def _at(states: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Rows of states [B * L, H] at the start slots, [B, M, H]."""
    rows = batch.slots + torch.arange(len(batch.slots), device=batch.slots.device)[:, None] * batch.tokens.shape[1]
    return states[rows]


class RecursionAttention:
    """The two `Attend`s of a recursion; `first` keeps what `later` needs."""

    def __init__(self, head: MtpHead, batch: PackedBatch) -> None:
        block = head.config.block
        self._scale = block.head_dim**-0.5
        self._windows = block.layer_windows
        self._shape = batch.tokens.shape
        self._slots = batch.slots
        self._text_starts = batch.text_starts
        self._positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        self._keys: list[list[torch.Tensor]] = []  # by layer: pass 1 [B, L, Hkv, D], later ones [B, M, Hkv, D]
        self._values: list[list[torch.Tensor]] = []
        self._first_of_slots = batch.text_starts.gather(1, batch.slots)

    def first(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Pass 1: q, k, v of all B * L positions."""
        rows, length = self._shape
        self._keys.append([k.view(rows, length, *k.shape[1:])])
        self._values.append([v.view(rows, length, *v.shape[1:])])
        at = self._positions.expand(rows, length)
        return self._attend(layer, q, self._mask(layer, at, self._text_starts, at), num_own=0)

    def later(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """A further pass: q, k, v of all B * M start slots."""
        self._keys[layer].append(k.view(*self._slots.shape, *k.shape[1:]))
        self._values[layer].append(v.view(*self._slots.shape, *v.shape[1:]))
        num_own = len(self._keys[layer]) - 1
        mask = self._mask(layer, self._slots, self._first_of_slots, self._slots + num_own)
        return self._attend(layer, q, mask, num_own)

    def _mask(self, layer: int, last: torch.Tensor, first: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Which keys of pass 1 a query at `at` sees: from `first` to `last`, within the layer's window. [B, Q, L]"""
        window = self._windows[layer]
        if window is not None:
            first = torch.maximum(first, at - window + 1)
        return (self._positions >= first[..., None]) & (self._positions <= last[..., None])

    def _attend(self, layer: int, q: torch.Tensor, mask: torch.Tensor, num_own: int) -> torch.Tensor:
        """q [B * Q, Hq, D], mask [B, Q, L] of the keys of pass 1; the `num_own` last keys of the slot are all seen,
        but for those that the window has left behind."""
        keys, values = self._keys[layer], self._values[layer]
        rows, queries = mask.shape[:2]
        num_kv, dim = keys[0].shape[2:]
        groups = q.shape[1] // num_kv
        q = q.view(rows, queries, num_kv, groups, dim).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, Q, D]
        flat = q.reshape(rows, num_kv, groups * queries, dim)
        scores = flat @ keys[0].permute(0, 2, 3, 1)  # [B, Hkv, G * Q, L]
        scores = scores.view(rows, num_kv, groups, queries, -1).masked_fill(~mask[:, None, None], -torch.inf)
        own = [(q * key.permute(0, 2, 1, 3)[:, :, None]).sum(-1, keepdim=True) for key in keys[1:]]
        own = self._within_window(layer, own, num_own)
        probs = (torch.cat((scores, *own), dim=-1).float() * self._scale).softmax(-1).to(q.dtype)
        length = scores.shape[-1]
        out = probs[..., :length].reshape(rows, num_kv, groups * queries, length) @ values[0].permute(0, 2, 1, 3)
        out = out.view(rows, num_kv, groups, queries, dim)
        for index, value in enumerate(values[1:]):
            out = out + probs[..., length + index, None] * value.permute(0, 2, 1, 3)[:, :, None]
        return out.permute(0, 3, 1, 2, 4).reshape(rows * queries, -1)

    def _within_window(self, layer: int, own: list[torch.Tensor], num_own: int) -> list[torch.Tensor]:
        window = self._windows[layer]
        if window is None:
            return own
        return [
            score if num_own - 1 - index < window else torch.full_like(score, -torch.inf)
            for index, score in enumerate(own)
        ]
