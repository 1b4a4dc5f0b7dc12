"""Draft-target speculation: a small model of the target's vocabulary drafts (Leviathan et al. 2023, arXiv 2211.17192).

The draft has keys and values of its own in the pages of the target. A step: k tokens from the carried logits, which
takes k - 1 forward passes; verification by the target; one ingest pass over `[x_1 .. x_tau, Y]` at the positions
behind the sequence that was known, which also covers the last draft of a full acceptance and the target's own token
Y, and leaves the logits for the next step. So the draft is one token ahead of the target. What a rejected token wrote
is overwritten before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F

from sonar_engine.device import to_device
from sonar_engine.drafters.base import Draft, Verdict
from sonar_engine.drafters.draft_chain import ActiveRows, draft_chain
from sonar_engine.drafters.draft_cursors import DraftCursors
from sonar_engine.drafters.draft_sampler import DraftSampler
from sonar_engine.drafters.draft_source import find_draft
from sonar_engine.drafters.span_batch import Spans, span_batch
from sonar_engine.drafters.token_history import TokenHistory
from sonar_engine.step_buffers import BatchMetadata

if TYPE_CHECKING:
    from sonar_engine._scheduler import Scheduler
    from sonar_engine.config import EngineConfig
    from sonar_engine.drafters.registry import DrafterContext
    from sonar_engine.model_runner import ModelRunner


@dataclass(frozen=True)
class _Ingested:
    """What the last step ran over; how far that counts is known once its verdict has reached the host."""

    slots: np.ndarray  # int64 [N]
    known: np.ndarray  # int64 [N], tokens before the verdict
    rows: np.ndarray  # int64 [N], of the batch that the verdict is on
    verdict: Verdict


class DraftModelDrafter:
    """Batches of all rows in every forward pass, without Python a request.

    Steps that draft nothing do not run the draft; requests without speculation never do. A slot that has fallen
    behind catches up, in one pass for all of them, when it is to draft again.
    """

    needs_hidden: Literal["none"] = "none"
    runs_on: Literal["leader"] = "leader"

    def __init__(
        self,
        runner: ModelRunner,
        sampler: DraftSampler,
        scheduler: Scheduler,
        config: EngineConfig,
        vocab_size: int,
        *,
        compacts: bool,
    ) -> None:
        """`runner` is the draft's, over the target's pages; `vocab_size` the width of the target's logits.

        `compacts`: the verdict is on the host at once, so that rejected drafts are left out of the ingest run.
        """
        plan, device = runner.kv_cache.plan, runner.device
        max_num_seqs, k = config.max_num_seqs, config.speculative.num_speculative_tokens
        self._runner = runner
        self._sampler = sampler
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._lens = np.full(max_num_seqs, k, np.int32)
        self._speculates = np.zeros(max_num_seqs, np.bool_)
        self._history = TokenHistory(max_num_seqs, plan.reserved_len, runner.vocab_size, device)
        self._cursors = DraftCursors(max_num_seqs, plan.max_pages_per_seq, plan.num_pages, plan.page_size)
        self._carried = torch.zeros((max_num_seqs, vocab_size), dtype=torch.float32, device=device)  # logits
        self._ingested: _Ingested | None = None
        self._most_tokens = config.max_num_batched_tokens + max_num_seqs * (k + 1)  # of one pass
        self._compacts = compacts

    @classmethod
    def build(cls, context: DrafterContext) -> DraftModelDrafter:
        """Loads the draft beside the target. Raises ConfigError or ModelLoadError."""
        draft, target = find_draft(context.config), context.runner
        runner = target.load_beside(draft.engine_config, draft.resolved)
        sampler = DraftSampler(context.sampling, target.cpu_kernels)
        compacts = not context.device.runs_alone
        return cls(runner, sampler, context.scheduler, context.config, target.vocab_size, compacts=compacts)

    @property
    def kv_layers(self) -> int:
        return len(self._runner.kv_cache.layers)

    def draft_lens(self) -> np.ndarray | None:
        return self._lens

    def admit(self, slot: int, request_id: int, speculate: int) -> None:
        self._speculates[slot] = speculate > 0
        if speculate > 0:
            self._history.admit(slot, self._scheduler.request_tokens(request_id))

    def propose(self, batch: BatchMetadata) -> Draft | None:
        self._settle()
        self._cursors.observe(batch)
        if batch.num_drafts == 0:
            return None
        self._catch_up(batch)
        return self._draft(batch)

    def ingest(self, batch: BatchMetadata, hidden: torch.Tensor, verdict: Verdict) -> None:
        self._history.append(batch, verdict)
        only_decodes = batch.num_decode_reqs == batch.num_reqs
        if only_decodes and batch.num_drafts == 0:
            return
        slots, known = _slots(batch), _known_len(batch)
        is_decode = np.arange(batch.num_reqs) < batch.num_decode_reqs
        is_level = self._cursors.cursors[slots] == known
        rows = np.flatnonzero(self._speculates[slots] & (is_level | ~is_decode))
        if len(rows) == 0:
            return
        index = to_device(rows, self._runner.device)
        num_emitted = verdict.num_emitted[index]
        spans = self._ingest_spans(batch, rows, num_emitted)
        samples = np.flatnonzero(np.diff(batch.host["sample_indptr"])[rows])
        # The row of the last emitted token: its logits are those of the next draft.
        last = (batch.kv_len - batch.num_draft_tokens)[index] + num_emitted - 1
        self._run(spans, samples, last)
        self._ingested = _Ingested(spans.slots, known[rows], rows, verdict)

    def _ingest_spans(self, batch: BatchMetadata, rows: np.ndarray, num_emitted: torch.Tensor) -> Spans:
        """From the cursor on: prompt tokens, then emitted tokens and, unless rows are compacted, junk to the end."""
        slots, known = _slots(batch)[rows], _known_len(batch)[rows]
        starts = self._cursors.cursors[slots]
        if not self._compacts:
            return Spans(slots, starts, known + np.diff(batch.host["sample_indptr"])[rows])
        emitted = num_emitted.numpy().astype(np.int64)
        # Drafting has run over all drafts but the last.
        num_drafted = np.maximum(batch.host["num_draft_tokens"][rows] - 1, 0)
        return Spans(slots, starts + np.minimum(num_drafted, np.maximum(emitted - 1, 0)), known + emitted)

    def _settle(self) -> None:
        """Moves the cursors by the last step's verdict, which the commit has brought to the host."""
        ingested, self._ingested = self._ingested, None
        if ingested is not None:
            num_emitted = ingested.verdict.host_counts()[ingested.rows]
            self._cursors.advance(ingested.slots, ingested.known + num_emitted)

    def _catch_up(self, batch: BatchMetadata) -> None:
        """Brings every row that drafts to the end of its sequence, with its logits carried."""
        slots, known = _slots(batch), _known_len(batch)
        behind = np.flatnonzero((batch.host["num_draft_tokens"] > 0) & (self._cursors.cursors[slots] < known))
        if len(behind) == 0:
            return
        spans = Spans(slots[behind], self._cursors.cursors[slots[behind]], known[behind])
        last = to_device(spans.ends - 1, self._runner.device)
        self._run(spans, np.arange(len(behind)), last)
        self._cursors.advance(spans.slots, spans.ends)

    def _draft(self, batch: BatchMetadata) -> Draft:
        def next_logits(rows: ActiveRows, tokens: torch.Tensor | None) -> torch.Tensor:
            if tokens is None:
                return self._carried.index_select(0, rows.device_slots)
            ends = rows.known + rows.step
            return self._logits(self._forward(Spans(rows.slots, ends - 1, ends), tokens))

        return draft_chain(batch, self._sampler, next_logits)

    def _run(self, spans: Spans, samples: np.ndarray, last: torch.Tensor) -> None:
        """Runs over the tokens of `spans` and carries the logits at position last[r] of the rows in `samples`."""
        spans = self._shorten(spans)
        hidden = self._forward(spans, None)
        if len(samples) == 0:
            return
        device = self._runner.device
        first_rows = np.cumsum(spans.lens) - spans.lens
        index, offsets = to_device(samples, device), to_device(first_rows - spans.starts, device)
        logits = self._logits(hidden[(last + offsets)[index]])
        self._carried[to_device(spans.slots[samples], device)] = logits

    def _shorten(self, spans: Spans) -> Spans:
        """Runs leading tokens of long rows, so that what remains is one pass of bounded size."""
        tail = int(self._lens[0]) + 1  # positions at a row's end that stay together
        while (excess := int(spans.lens.sum()) - self._most_tokens) > 0:
            room = np.maximum(spans.lens - tail, 0)
            before = np.cumsum(room) - room
            takes = np.clip(min(excess, self._most_tokens) - before, 0, room)
            part = Spans(spans.slots, spans.starts, spans.starts + takes).rows(np.flatnonzero(takes))
            self._forward(part, None)
            spans = Spans(spans.slots, spans.starts + takes, spans.ends)
        return spans

    def _forward(self, spans: Spans, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [T, H] of `token_ids` int32 [T], None: of the requests' own tokens."""
        plan = self._runner.kv_cache.plan
        batch = span_batch(spans, self._runner.page_table, plan.page_size)
        if token_ids is None:
            token_ids = self._history.tokens[batch.slots[batch.token_reqs], batch.positions]
        batch.token_ids = token_ids
        return self._runner.forward(batch)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [N, V]: the padding of both heads may differ, the tokens do not."""
        logits = self._runner.model.logits(hidden)
        missing = self._vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def _slots(batch: BatchMetadata) -> np.ndarray:
    """int64 [R]"""
    return batch.host["slots"].astype(np.int64)


def _known_len(batch: BatchMetadata) -> np.ndarray:
    """Tokens of each row's sequence up to the last one that is no draft, int64 [R]."""
    return (batch.host["kv_len"] - batch.host["num_draft_tokens"]).astype(np.int64)
