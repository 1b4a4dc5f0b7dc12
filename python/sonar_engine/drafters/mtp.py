"""Speculation with an MTP head: a small module behind the target's last hidden state (DeepSeek-V3, arXiv 2412.19437).

The head's entry at position i comes from the target's hidden state there and the token at i + 1. After every step,
whatever kind of batch it was, the head runs over all rows of the target's batch with the target's hidden states, the
tokens one to the left: so its keys and values are complete wherever the target's are, and never come from its own
features for longer than the step that drafted with them. The row of the last accepted draft is carried by slot: what it
has for the output matrix gives the next step's first draft, its feature goes into the second. The output matrix, larger
than the head, is left to steps that draft.

A step drafts k tokens in k - 1 passes of the head over its own features. On a device the head runs over rejected drafts
too, with the batch metadata that the target has used, and waits for nothing; a CPU leaves them out.

With a prompt lookup, rows whose last tokens occurred before draft what followed them, in place of the head's: free,
and where a text repeats itself more often right.

After a step that was reverted behind its `ingest` the carried row may be one of that step. The next draft is then a
poor one, once, and is verified like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from sonar_kernels import copy_rows, shift_tokens

from sonar_engine.attention.base import Attention
from sonar_engine.attention.select import select_attention
from sonar_engine.cuda_graphs import CudaGraphs, Input, open_graphs
from sonar_engine.device import to_device
from sonar_engine.drafters.base import Draft, Verdict
from sonar_engine.drafters.draft_chain import ActiveRows, GivenDrafts, draft_chain
from sonar_engine.drafters.draft_sampler import DraftSampler
from sonar_engine.drafters.mtp_checkpoint import load_head
from sonar_engine.drafters.mtp_head import HeadStates, MtpHead
from sonar_engine.drafters.mtp_source import find_head
from sonar_engine.drafters.ngram import PromptLookup
from sonar_engine.drafters.span_batch import Spans, span_batch
from sonar_engine.kv_cache import KvCache, allocate_layers
from sonar_engine.models.registry import resolve_model
from sonar_engine.models.weights import load_output_rows
from sonar_engine.step_buffers import BatchMetadata

if TYPE_CHECKING:
    from sonar_engine.config import EngineConfig
    from sonar_engine.drafters.registry import DrafterContext
    from sonar_engine.layers.base import Linear
    from sonar_engine.model_runner import ModelRunner


@dataclass(frozen=True)
class HeadPass:
    """One pass of a head over the batch that `attention` has begun; `embedding` [V, H] is the target's."""

    head: MtpHead
    embedding: torch.Tensor
    attention: Attention

    def __call__(self, positions: torch.Tensor, tokens: torch.Tensor, features: torch.Tensor) -> HeadStates:
        """positions int32 [T], tokens int32 [T] at positions + 1, features [T, H]."""
        return self.head(self.embedding.index_select(0, tokens), features, positions, self.attention.forward)


class MtpDrafter:
    """Batches of all rows in every pass, without Python a request."""

    needs_hidden: Literal["last"] = "last"
    runs_on: Literal["all"] = "all"

    def __init__(
        self,
        head: MtpHead,
        target: ModelRunner,
        config: EngineConfig,
        *,
        kv_cache: KvCache,
        attention: Attention,
        output: Linear,
        sampler: DraftSampler,
        token_map: torch.Tensor | None = None,
        graphs: CudaGraphs | None = None,
        lookup: PromptLookup | None = None,
        compacts: bool,
    ) -> None:
        """`kv_cache` has the head's layers over the target's pages, `attention` attends over them.

        `output` turns states [N, H] into logits fp32 [N, W]; `token_map` int32 [W] as in `Draft`; `graphs`
        are of its `HeadPass`; `compacts`: the verdict is on the host at once, so that the head leaves rejected drafts
        out.
        """
        device, max_num_seqs = target.device, config.max_num_seqs
        self._kv_cache = kv_cache
        self._attention = attention
        self._output = output
        self._sampler = sampler
        self._token_map = token_map
        self._lookup = lookup
        self._own_ids = None if token_map is None else _own_ids(token_map, target.vocab_size)
        self._graphs = graphs
        self._pass = HeadPass(head, target.model.embedding, attention)
        self._lens = np.full(max_num_seqs, config.speculative.num_speculative_tokens, np.int32)
        self._speculates = np.zeros(max_num_seqs, np.bool_)
        # Carried by slot: what the head gave at the position before the sequence's last token.
        shape = (max_num_seqs, target.config.hidden_size)
        for_logits = torch.zeros(shape, dtype=target.dtype, device=device)
        features = for_logits if head.feeds_back_normed else torch.zeros_like(for_logits)
        self._carried = HeadStates(for_logits, features)
        self._compacts = compacts

    @classmethod
    def build(cls, context: DrafterContext) -> MtpDrafter:
        """Loads the head beside the target. Raises ConfigError or ModelLoadError."""
        target, config = context.runner, context.config
        resolved = resolve_model(config.model)
        files = find_head(config, resolved)
        plan, block = target.kv_cache.plan, files.config.block
        loaded = load_head(
            files,
            resolved.path,
            target.config,
            max_positions=plan.reserved_len,
            dtype=target.dtype,
            device=target.device,
        )
        loaded.head.pack(target.ops)
        layers = allocate_layers(plan, block, target.dtype, target.device)
        kv_cache = replace(target.kv_cache, layers=layers)
        _, attention = select_attention(config, block, kv_cache, target.ops)
        inputs = [Input((), torch.int32), Input((target.config.hidden_size,), target.dtype)]
        run = HeadPass(loaded.head, target.model.embedding, attention)
        graphs = open_graphs(config, kv_cache, attention, run, inputs)
        output, token_map = target.model.output, loaded.token_map
        if token_map is not None:
            rows = load_output_rows(resolved.path, target.config, token_map.cpu().long(), target.dtype, target.device)
            output = target.ops.linear(rows, None, out_dtype=torch.float32)
        sampler = DraftSampler(context.sampling, target.cpu_kernels, token_map)
        return cls(
            loaded.head,
            target,
            config,
            kv_cache=kv_cache,
            attention=attention,
            output=output,
            sampler=sampler,
            token_map=token_map,
            graphs=graphs,
            lookup=PromptLookup(context.scheduler, config.speculative, config.max_num_seqs)
            if config.speculative.prompt_lookup
            else None,
            compacts=not context.device.runs_alone,
        )

    @property
    def kv_layers(self) -> int:
        return len(self._kv_cache.layers)

    def draft_lens(self) -> np.ndarray | None:
        if self._lookup is not None:
            self._lookup.find()
        return self._lens

    def admit(self, slot: int, request_id: int, speculate: int) -> None:
        self._speculates[slot] = speculate > 0

    def propose(self, batch: BatchMetadata) -> Draft | None:
        if batch.num_drafts == 0:
            return None
        features = self._carried.features[batch.slots[: batch.num_decode_reqs]]  # [D, H]

        def next_logits(rows: ActiveRows, tokens: torch.Tensor | None) -> torch.Tensor:
            if tokens is None:
                return self._output(self._carried.for_logits[rows.device_slots])
            # Draft 0 is the token at position `known`; its entry is that of the position before.
            positions = rows.known + rows.step - 2
            pass_batch = self._span_batch(Spans(rows.slots, positions, positions + 1))
            states = self._run(pass_batch, tokens, features[rows.index])
            features[rows.index] = states.features
            return self._output(states.for_logits)

        given = None if self._lookup is None else self._looked_up(batch, self._lookup)
        return draft_chain(batch, self._sampler, next_logits, self._token_map, given)

    def _looked_up(self, batch: BatchMetadata, lookup: PromptLookup) -> GivenDrafts | None:
        """The rows for which enough was found. Where probabilities are needed, it must be in the head's vocabulary."""
        num_decode, most = batch.num_decode_reqs, batch.max_draft_tokens
        slots, lens = batch.host["slots"][:num_decode], batch.host["num_draft_tokens"][:num_decode]
        tokens = lookup.tokens[slots, :most]
        own_ids = tokens if self._own_ids is None else self._own_ids[tokens]
        is_drawable = ((own_ids >= 0) | (np.arange(most) >= lens[:, None])).all(axis=1)
        is_given = (lookup.lens[slots] >= lens) & (is_drawable | ~self._sampler.draws(slots))
        return GivenDrafts(is_given, tokens, np.maximum(own_ids, 0)) if is_given.any() else None

    def ingest(self, batch: BatchMetadata, hidden: torch.Tensor, verdict: Verdict) -> None:
        tokens = shift_tokens(
            batch.token_ids,
            batch.token_reqs,
            batch.qo_indptr,
            batch.sample_indptr,
            batch.next_prompt_token,
            verdict.tokens,
        )
        # The row of the last accepted draft, or of the last known token; of no meaning in rows that do not sample.
        last = batch.qo_indptr[1:] - batch.num_draft_tokens - 2 + verdict.num_emitted
        if self._compacts and batch.num_drafts > 0:
            kept, accepted = self._without_rejected(batch, last)
            states = self._run(accepted, tokens[kept], hidden[kept])
            last = accepted.qo_indptr[1:] - 1
        else:
            states = self._run(batch, tokens, hidden)
        self._carry(batch, states, last)

    def _without_rejected(self, batch: BatchMetadata, last: torch.Tensor) -> tuple[torch.Tensor, BatchMetadata]:
        """The tokens up to `last` int32 [R] of rows that sample, all of others: which they are, and their batch."""
        host = batch.host
        samples = np.diff(host["sample_indptr"]) > 0
        ends = np.where(samples, last.numpy() + 1, host["qo_indptr"][1:])
        kept = np.flatnonzero(np.arange(batch.num_tokens) < ends[host["token_reqs"]])
        starts = host["num_computed_tokens"].astype(np.int64)
        spans = Spans(host["slots"].astype(np.int64), starts, starts + ends - host["qo_indptr"][:-1])
        return torch.from_numpy(kept), self._span_batch(spans)

    def _carry(self, batch: BatchMetadata, states: HeadStates, last: torch.Tensor) -> None:
        """Row `last` int32 [R] of what the head gave, by slot, for rows that may draft in the next step."""
        host = batch.host
        rows = np.flatnonzero((np.diff(host["sample_indptr"]) > 0) & self._speculates[host["slots"]])
        if len(rows) == 0:
            return
        index = to_device(rows, last.device)
        last, slots = last[index], batch.slots[index]
        copy_rows(states.for_logits, last, self._carried.for_logits, slots)
        if self._carried.features is not self._carried.for_logits:
            copy_rows(states.features, last, self._carried.features, slots)

    def _run(self, batch: BatchMetadata, tokens: torch.Tensor, features: torch.Tensor) -> HeadStates:
        """One pass of the head: tokens int32 [T] at positions + 1, features [T, H]."""
        replayed = None if self._graphs is None else self._graphs.replay(batch, tokens, features)
        if replayed is not None:
            return HeadStates(*replayed)
        self._attention.begin(batch)
        return self._pass(batch.positions, tokens, features)

    def _span_batch(self, spans: Spans) -> BatchMetadata:
        return span_batch(spans, self._kv_cache.page_table, self._kv_cache.plan.page_size)


def _own_ids(token_map: torch.Tensor, vocab_size: int) -> np.ndarray:
    """The draft's own id of each target id, int32 [V]; -1 where it has none. Waits for the device."""
    own_ids = np.full(vocab_size, -1, np.int32)
    own_ids[token_map.cpu().numpy()] = np.arange(len(token_map), dtype=np.int32)
    return own_ids
