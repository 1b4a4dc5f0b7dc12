"""Paged attention in plain torch: any device, the reference of the others.

Gathers keys and values through the page table. Decode rows are padded to one block, prompt chunks are cut into
blocks of query tokens, and blocks are batched until they hold `_MAX_GATHERED_TOKENS` keys, so that a long prompt
beside many decoding rows costs neither padding nor memory out of proportion.

Batch-invariant mode: token by token. Every call's shape and strides are a function of the token's own position
(keys [position + 1, Hkv, D] of its row), so neither the other rows, nor how a prompt was cut into chunks, nor
padding can reach its result; keys and values are the same bits wherever their pages lie, since they are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from sonar_engine.device import to_device
from sonar_engine.step_buffers import BatchMetadata

_QUERY_BLOCK = 128  # query tokens of one block of a prompt chunk
_MAX_GATHERED_TOKENS = 32768  # keys of one group of blocks, padding included


@dataclass(frozen=True)
class _Group:
    """Blocks that are attended in one call. B = blocks, Q = most query tokens, L = most keys of a block.

    Padding repeats a block's last token and last key, so that every index is valid.
    """

    tokens: torch.Tensor  # int64 [B, Q] index into the batch's tokens
    keys: torch.Tensor  # int64 [B * L] index into the flat cache
    num_keys: int  # L
    mask: torch.Tensor  # bool [B, 1, Q, L], true where the query sees the key
    kept: torch.Tensor | None  # int64, which of the B * Q outputs are tokens, in order; None: all


@dataclass(frozen=True)
class _Step:
    """What all layers of a step share."""

    key_rows: torch.Tensor  # int64 [T] where each token's key goes in the flat cache
    groups: list[_Group]
    rows: list[_Row]


@dataclass(frozen=True)
class _Row:
    """One row of the batch, in the batch-invariant mode."""

    tokens: slice  # [start, end) in the batch's tokens
    first_position: int
    keys: torch.Tensor  # int64 [kv_len]


class TorchAttention:
    """`attention.base.Attention` over `kv_caches` [num_pages, 2, page_size, Hkv, D], one a layer."""

    def __init__(
        self,
        kv_caches: list[torch.Tensor],
        scale: float,
        window: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self._caches = [cache.view(-1, *cache.shape[3:]) for cache in kv_caches]  # [num_pages * 2 * page_size, Hkv, D]
        self._page_size = kv_caches[0].shape[2]
        self._scale, self._window = scale, window
        self._batch_invariant = batch_invariant
        self._step: _Step | None = None

    def begin(self, batch: BatchMetadata) -> None:
        slots = batch.slot_mapping.long()
        key_rows = slots + slots // self._page_size * self._page_size
        rows = self._rows(batch) if self._batch_invariant else []
        groups = [] if self._batch_invariant else self._groups(batch)
        self._step = _Step(key_rows, groups, rows)

    def can_capture(self, num_rows: int, q_len: int) -> bool:
        return False  # shapes follow the longest sequence

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        step, cache = self._step, self._caches[layer]
        if step is None:
            raise RuntimeError("begin(batch) must come before forward")
        cache.index_copy_(0, step.key_rows, k)
        cache.index_copy_(0, step.key_rows + self._page_size, v)
        if self._batch_invariant:
            return self._token_by_token(step.rows, cache, q)
        outputs = [self._attend(group, cache, q) for group in step.groups]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _attend(self, group: _Group, cache: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Outputs [tokens of the group, Hq * D], in token order."""
        num_blocks, num_queries = group.tokens.shape
        queries = q[group.tokens].transpose(1, 2)  # [B, Hq, Q, D]
        shape = (num_blocks, group.num_keys, *cache.shape[1:])
        keys = cache.index_select(0, group.keys).view(shape).transpose(1, 2)  # [B, Hkv, L, D]
        values = cache.index_select(0, group.keys + self._page_size).view(shape).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=group.mask, scale=self._scale, enable_gqa=True
        )
        flat = out.transpose(1, 2).reshape(num_blocks * num_queries, -1)
        return flat if group.kept is None else flat.index_select(0, group.kept)

    def _token_by_token(self, rows: list[_Row], cache: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        for row in rows:
            keys = cache.index_select(0, row.keys).float()  # [kv_len, Hkv, D]
            values = cache.index_select(0, row.keys + self._page_size).float()
            for index in range(row.tokens.start, row.tokens.stop):
                end = row.first_position + index - row.tokens.start + 1
                start = 0 if self._window is None else max(0, end - self._window)
                out[index] = _attend_token(q[index], keys[start:end], values[start:end], self._scale)
        return out

    def _groups(self, batch: BatchMetadata) -> list[_Group]:
        indptr = batch.host["qo_indptr"].astype(np.int64)
        kv_len = batch.host["kv_len"].astype(np.int64)
        q_len = np.diff(indptr)
        num_decode = batch.num_decode_reqs
        longest_decode = int(q_len[:num_decode].max(initial=0))
        block_len = np.where(np.arange(len(q_len)) < num_decode, max(longest_decode, 1), _QUERY_BLOCK)
        blocks_of_row = -(-q_len // block_len)
        row = np.repeat(np.arange(len(q_len)), blocks_of_row)  # [blocks]
        nth = np.arange(len(row)) - np.repeat(np.cumsum(blocks_of_row) - blocks_of_row, blocks_of_row)
        start = indptr[row] + nth * block_len[row]  # first query token of the block
        length = np.minimum(start + block_len[row], indptr[row + 1]) - start
        num_keys = kv_len[row] - (indptr[row + 1] - (start + length))  # keys up to the block's last token
        num_decode_blocks = int(blocks_of_row[:num_decode].sum())
        return [
            self._group(batch, row[a:b], start[a:b], length[a:b], num_keys[a:b])
            for a, b in _split_blocks(num_keys, num_decode_blocks)
        ]

    def _group(
        self, batch: BatchMetadata, row: np.ndarray, start: np.ndarray, length: np.ndarray, num_keys: np.ndarray
    ) -> _Group:
        device, page_size = batch.page_table.device, self._page_size
        most_queries, most_keys = int(length.max()), int(num_keys.max())
        offsets = np.arange(most_queries)
        tokens = start[:, None] + np.minimum(offsets, length[:, None] - 1)  # [B, Q]
        query_positions = num_keys[:, None] - length[:, None] + np.minimum(offsets, length[:, None] - 1)
        kept = None if (length == most_queries).all() else np.flatnonzero(offsets < length[:, None])
        queries_at = to_device(query_positions, device)[:, :, None]  # [B, Q, 1]
        last_key = to_device(num_keys - 1, device)[:, None]  # [B, 1]
        keys_at = torch.arange(most_keys, device=device)
        mask = keys_at <= queries_at  # [B, Q, L]
        if self._window is not None:
            mask &= keys_at > queries_at - self._window
        slots = to_device(batch.host["slots"][row].astype(np.int64), device)
        positions = torch.minimum(keys_at, last_key)  # [B, L]
        pages = batch.page_table[slots[:, None], positions // page_size].long()
        return _Group(
            tokens=to_device(tokens, device),
            keys=(pages * (2 * page_size) + positions % page_size).flatten(),
            num_keys=most_keys,
            mask=mask[:, None],
            kept=None if kept is None else to_device(kept, device),
        )

    def _rows(self, batch: BatchMetadata) -> list[_Row]:
        page_size = self._page_size
        indptr, kv_len, slots = (batch.host[name].tolist() for name in ("qo_indptr", "kv_len", "slots"))
        rows = []
        for index, slot in enumerate(slots):
            positions = torch.arange(kv_len[index], device=batch.page_table.device)
            pages = batch.page_table[slot].index_select(0, positions // page_size).long()
            start, end = indptr[index], indptr[index + 1]
            rows.append(
                _Row(
                    tokens=slice(start, end),
                    first_position=kv_len[index] - (end - start),
                    keys=pages * (2 * page_size) + positions % page_size,
                )
            )
        return rows


def _attend_token(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """q [Hq, D], keys and values fp32 [L, Hkv, D] -> [Hq * D]; scores and sums in fp32."""
    num_kv_heads = keys.shape[1]
    queries = q.float().view(num_kv_heads, -1, q.shape[-1])  # [Hkv, G, D]
    scores = torch.matmul(queries, keys.permute(1, 2, 0)) * scale  # [Hkv, G, L]
    probs = torch.softmax(scores, dim=-1)
    return torch.matmul(probs, values.transpose(0, 1)).reshape(-1).to(q.dtype)


def _split_blocks(num_keys: np.ndarray, num_decode_blocks: int) -> list[tuple[int, int]]:
    """Half-open ranges of blocks: decode apart from prompt chunks, at most `_MAX_GATHERED_TOKENS` padded keys each."""
    ranges = []
    for first, last in ((0, num_decode_blocks), (num_decode_blocks, len(num_keys))):
        if first == last:
            continue
        per_group = max(1, _MAX_GATHERED_TOKENS // int(num_keys[first:last].max()))
        ranges += [(a, min(a + per_group, last)) for a in range(first, last, per_group)]
    return ranges
