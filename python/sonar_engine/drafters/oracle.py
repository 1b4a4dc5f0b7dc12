"""Replays known texts, wrong at given rates: any acceptance that a load test or a comparison asks for.

The texts are what the target says without speculation, so that a right draft is accepted and a wrong one is not; the
target decides, as for every drafter.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from sonar_kernels import coins

from sonar_engine.drafters.base import Draft, Verdict
from sonar_engine.drafters.oracle_texts import read_oracle_texts
from sonar_engine.step_buffers import BatchMetadata

if TYPE_CHECKING:
    from sonar_engine._scheduler import Scheduler
    from sonar_engine.drafters.registry import DrafterContext


class OracleDrafter:
    """Requests whose prompt has a text draft what comes next in it; others draft nothing.

    Draft j of a step (from 0) is right with probability rates[j], the last rate standing for all further ones. Whether
    it is, is a coin of the text and of the place in it: the same in every run, with any batch, after a preemption. A
    wrong token is the right one plus 1. Past the end of a text nothing is drafted. Drafts are one-hot.
    """

    needs_hidden: Literal["none"] = "none"
    runs_on: Literal["leader"] = "leader"
    kv_layers = 0

    def __init__(
        self,
        scheduler: Scheduler,
        texts: Mapping[bytes, np.ndarray],
        rates: Sequence[float],
        *,
        num_drafts: int,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`texts`: output int32 [N] by prompt, the bytes of its int32 ids; `num_drafts`: most drafts a step."""
        self._scheduler = scheduler
        self._texts = texts
        self._num_drafts = num_drafts
        self._vocab_size = vocab_size
        all_rates = [rates[min(index, len(rates) - 1)] for index in range(num_drafts)]
        self._rates = torch.tensor(all_rates, dtype=torch.float32, device=device)
        # By slot.
        width = max((len(text) for text in texts.values()), default=0) + num_drafts + 1
        self._tokens = torch.zeros((max_num_seqs, width), dtype=torch.int32, device=device)
        self._seeds = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._text_lens = np.zeros(max_num_seqs, np.int32)
        self._lens = np.zeros(max_num_seqs, np.int32)

    @classmethod
    def build(cls, context: DrafterContext) -> OracleDrafter:
        """Raises ConfigError when the file of texts cannot be read."""
        config, runner = context.config, context.runner
        return cls(
            context.scheduler,
            read_oracle_texts(config.speculative.oracle_texts, runner.vocab_size),
            config.speculative.oracle_rates,
            num_drafts=config.speculative.num_speculative_tokens,
            max_num_seqs=config.max_num_seqs,
            vocab_size=runner.vocab_size,
            device=runner.device,
        )

    def draft_lens(self) -> np.ndarray | None:
        return self._lens if self._lens.any() else None

    def admit(self, slot: int, request_id: int, speculate: int) -> None:
        num_prompt = self._scheduler.num_prompt_tokens(request_id)
        prompt = self._scheduler.request_tokens(request_id)[:num_prompt].tobytes()
        text = self._texts.get(prompt)
        if text is None or speculate == 0:
            self._text_lens[slot] = self._lens[slot] = 0
            return
        self._tokens[slot, : len(text)] = torch.from_numpy(text).to(self._tokens.device)
        self._seeds[slot] = int(np.uint32(zlib.crc32(prompt)).view(np.int32))
        self._text_lens[slot] = len(text)
        self._lens[slot] = min(self._num_drafts, len(text))

    def propose(self, batch: BatchMetadata) -> Draft | None:
        # Every row's next step begins at least one place further on.
        slots = batch.host["slots"]
        left = self._text_lens[slots] - batch.host["output_pos"] - 1
        self._lens[slots] = np.clip(left, 0, self._num_drafts)
        if batch.num_drafts == 0:
            return None
        num_decode, width = batch.num_decode_reqs, batch.max_draft_tokens
        rows = batch.slots[:num_decode].long()
        steps = torch.arange(width, dtype=torch.int32, device=rows.device)
        places = batch.output_pos[:num_decode, None] + steps  # [D, K]
        last_place = self._tokens.shape[1] - 1
        right = self._tokens[rows[:, None], places.clamp(max=last_place).long()]
        is_wrong = self.coins(rows, places) >= self._rates[:width]
        return Draft((right + is_wrong) % self._vocab_size)

    def coins(self, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """fp32 in [0, 1) [D, K]: what a draft's rate must exceed to be right, for `places` int32 [D, K] of a text."""
        seeds = self._seeds[slots][:, None]
        return coins.uniform(torch.zeros_like(places), seeds, torch.zeros_like(seeds), places)

    def ingest(self, batch: BatchMetadata, hidden: torch.Tensor, verdict: Verdict) -> None:
        pass
