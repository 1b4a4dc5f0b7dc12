"""The grammars of the sequences that run, by slot: what each may emit next, and after each of its drafts."""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher

from sonar_engine._scheduler import Events
from sonar_engine.step_buffers import BatchMetadata
from sonar_engine.structured.grammars import GrammarCompiler
from sonar_engine.structured.vocabulary import WORD, mask_words
from sonar_engine.types import StructuredOutput

_Job = tuple[LLMatcher, int, list[int]]  # a matcher, its first row of the masks, the drafts behind that row
_log = logging.getLogger(__name__)


class GrammarSlots:
    """One matcher a slot that holds a request with structured output.

    Drafts only advance a matcher for the masks of their own step: `observe` advances it by what was emitted.
    A matcher that gives up (a step that exceeds its limits) fails its request.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._matchers: dict[int, LLMatcher] = {}  # by slot
        self._executor: LLExecutor | None = None
        self._words = mask_words(compiler.vocab_size)
        self._failed: set[int] = set()

    def admit(self, slot: int, form: StructuredOutput | None, output_ids: np.ndarray) -> None:
        """A request enters `slot`; `output_ids` is what it has emitted so far."""
        self._matchers.pop(slot, None)
        self._failed.discard(slot)
        if form is not None:
            self._matchers[slot] = self._compiler.compile(form).deep_copy()
            self._advance(slot, output_ids.tolist())

    def masks(self, batch: BatchMetadata, asking: np.ndarray, draft_tokens: torch.Tensor | None) -> torch.Tensor:
        """What is allowed at the sampled rows `asking` (int64 [n]), bool [n, V] on the host.

        draft_tokens int32 [D, K] or None. Rows behind a draft that the grammar forbids, or that ends the text, are
        never used: they allow everything.
        """
        jobs = self._jobs(batch, asking, draft_tokens)
        words = self._fill(jobs.values(), len(asking))
        for slot, (matcher, first, drafts) in jobs.items():
            if matcher.is_error():
                self._fail(slot, matcher)
                words[first : first + len(drafts) + 1] = -1
        allowed = (words[:, :, None] >> torch.arange(WORD, dtype=torch.int32)).bitwise_and_(1).bool()
        return allowed.view(len(asking), -1)[:, : self._compiler.vocab_size]

    def _fill(self, jobs: Collection[_Job], num_rows: int) -> torch.Tensor:
        """The masks as bits, int32 [num_rows, W]."""
        words = torch.full((num_rows, self._words), -1, dtype=torch.int32)
        if self._executor is None:
            self._executor = LLExecutor()
        target, row_bytes = words.data_ptr(), self._words * words.element_size()
        plain = [(matcher, first) for matcher, first, drafts in jobs if not drafts]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, target, row_bytes, num_rows)
        drafted = [job for job in jobs if job[2]]
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, target, row_bytes, num_rows)
        return words

    def _jobs(self, batch: BatchMetadata, asking: np.ndarray, draft_tokens: torch.Tensor | None) -> dict[int, _Job]:
        """By slot."""
        drafts = [] if draft_tokens is None else draft_tokens.tolist()
        reqs, firsts, counts = np.unique(batch.host["sample_reqs"][asking], return_index=True, return_counts=True)
        slots = batch.host["slots"][reqs]
        return {
            slot: (self._matchers[slot], first, drafts[req][: count - 1] if count > 1 else [])
            for slot, req, first, count in zip(
                slots.tolist(), reqs.tolist(), firsts.tolist(), counts.tolist(), strict=True
            )
        }

    def observe(self, batch: BatchMetadata, events: Events) -> np.ndarray:
        """Advances by what a step emitted; the ids of requests whose grammar gave up, int64."""
        if not self._matchers:
            return np.empty(0, np.int64)
        slots = np.where(events.batch_rows >= 0, batch.host["slots"][events.batch_rows], -1)
        ends = np.cumsum(events.num_tokens)
        for slot, end, count, finish in zip(
            slots.tolist(), ends.tolist(), events.num_tokens.tolist(), events.finish.tolist(), strict=True
        ):
            if slot in self._matchers and finish == 0:
                self._advance(slot, events.tokens[end - count : end].tolist())
        failed = np.isin(slots, list(self._failed))
        self._failed -= set(slots[failed].tolist())
        return events.request_ids[failed]

    def _advance(self, slot: int, tokens: list[int]) -> None:
        matcher = self._matchers[slot]
        if matcher.try_consume_tokens(tokens) < len(tokens):
            self._fail(slot, matcher)

    def _fail(self, slot: int, matcher: LLMatcher) -> None:
        if slot not in self._failed:
            reason = matcher.get_error() or f"it does not take a token that was emitted ({matcher.stop_reason()})"
            _log.warning("a grammar gave up, and its request ends: %s", reason)
            self._failed.add(slot)
