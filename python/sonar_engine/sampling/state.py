"""What sampling remembers of each running request, by slot, and the rows of one batch that are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sonar_engine.drafters.base import Verdict
from sonar_engine.sampling.coins import Seeds, split_seed
from sonar_engine.sampling.row_pool import RowPool
from sonar_engine.sampling.validation import MAX_LOGIT_BIAS
from sonar_engine.step_buffers import BatchMetadata
from sonar_engine.types import SamplingParams

# What a request uses: bits of `SamplingState.uses`.
SAMPLED = 1 << 0  # temperature above 0
SEEDED = 1 << 1  # the user gave the seed
FORBIDDEN = 1 << 2  # allowed or banned ids
MIN_TOKENS = 1 << 3
BIAS = 1 << 4
PENALTIES = 1 << 5
MIN_P = 1 << 6
TOP = 1 << 7  # top-k or top-p
LOGPROBS = 1 << 8

# Columns of `SamplingState.floats` and `SamplingState.ints`.
INV_TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
TOP_K, SEED_LO, SEED_HI, MIN_NUM_TOKENS = range(4)


@dataclass(frozen=True)
class SampleRows:
    """The sampled rows of one batch, S of them: row s decides the output token at `positions[s]` of its request."""

    slots: torch.Tensor  # int64 [S]
    reqs: torch.Tensor  # int64 [S] batch row
    offsets: torch.Tensor  # int64 [S] 0 for a request's first row, i for the one after its i-th draft
    positions: torch.Tensor  # int32 [S]
    inv_temperature: torch.Tensor  # fp32 [S], 0 = greedy
    seeds: Seeds  # [S]
    host_slots: np.ndarray  # int32 [S]
    uses: np.ndarray  # uint16 [S]
    all_uses: int  # the union

    def that_use(self, bits: int) -> np.ndarray:
        """Indices of the rows that use any of `bits`, int64, ascending."""
        return np.flatnonzero(self.uses & bits)


class SamplingState:
    """Per-slot settings on the device, with a host mirror of who uses what.

    A batch in which nobody uses a feature pays nothing for it. `admit` fills a slot, also after a preemption;
    `observe` must follow every step, so that penalties see what was emitted.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device | str, eos_token_ids: Sequence[int]
    ) -> None:
        device = torch.device(device)
        self.vocab_size = vocab_size
        self.device = device
        self.floats = torch.zeros((max_num_seqs, 6), dtype=torch.float32, device=device)
        self.ints = torch.zeros((max_num_seqs, 4), dtype=torch.int32, device=device)
        self.uses = np.zeros(max_num_seqs, np.uint16)
        self.top_k = np.zeros(max_num_seqs, np.int64)  # vocab_size when off
        self.num_logprobs = np.zeros(max_num_seqs, np.int64)
        self.forbidden = RowPool(max_num_seqs, vocab_size, torch.bool, device)
        self.ends = RowPool(max_num_seqs, vocab_size, torch.bool, device)  # forbidden below min_tokens
        self.bias_ids = RowPool(max_num_seqs, MAX_LOGIT_BIAS, torch.int64, device)
        self.bias_values = RowPool(max_num_seqs, MAX_LOGIT_BIAS, torch.float32, device)
        self.in_prompt = RowPool(max_num_seqs, vocab_size, torch.bool, device)
        self.output_counts = RowPool(max_num_seqs, vocab_size, torch.int32, device)
        self._eos_token_ids = list(eos_token_ids)

    def admit(
        self, slot: int, params: SamplingParams, prompt_ids: np.ndarray, output_ids: np.ndarray, params_seed: int
    ) -> None:
        """A request entered `slot`; `params` must have passed `validation.validate`.

        `output_ids` is what it has emitted so far (empty unless it was preempted). `params_seed` is a 64-bit number
        drawn once for the request; it stands in for the seed where the user gave none.
        """
        top_k = params.top_k if params.top_k > 0 else self.vocab_size
        seed_lo, seed_hi = split_seed(params_seed if params.seed is None else params.seed)
        inv_temperature = 1 / params.temperature if params.temperature > 0 else 0.0
        log_min_p = float(np.log(params.min_p)) if params.min_p > 0 else -np.inf
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.floats[slot] = torch.tensor([inv_temperature, params.top_p, log_min_p, *penalties])
        self.ints[slot] = torch.tensor([top_k, seed_lo, seed_hi, params.min_tokens], dtype=torch.int32)
        self.uses[slot] = _uses(params)
        self.top_k[slot] = top_k
        self.num_logprobs[slot] = params.logprobs or 0
        self._admit_masks(slot, params)
        self._admit_bias(slot, params.logit_bias or {})
        self._admit_history(slot, prompt_ids, output_ids)

    def _admit_masks(self, slot: int, params: SamplingParams) -> None:
        self.forbidden.give_back(slot)
        self.ends.give_back(slot)
        if self.uses[slot] & FORBIDDEN:
            row = self.forbidden.lend(slot)
            if params.allowed_token_ids is not None:
                row.fill_(True)
                row[self._ids(params.allowed_token_ids)] = False
            row[self._ids(params.banned_token_ids or [])] = True
        if self.uses[slot] & MIN_TOKENS:
            self.ends.lend(slot)[self._ids([*self._eos_token_ids, *params.stop_token_ids])] = True

    def _admit_bias(self, slot: int, bias: dict[int, float]) -> None:
        self.bias_ids.give_back(slot)
        self.bias_values.give_back(slot)
        if bias:  # the rest of the row adds 0 to token 0
            self.bias_ids.lend(slot)[: len(bias)] = self._ids(list(bias))
            self.bias_values.lend(slot)[: len(bias)] = torch.tensor(list(bias.values()), device=self.device)

    def _admit_history(self, slot: int, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        self.in_prompt.give_back(slot)
        self.output_counts.give_back(slot)
        if self.uses[slot] & PENALTIES:
            self.in_prompt.lend(slot)[self._ids(prompt_ids)] = True
            counts = np.bincount(output_ids, minlength=self.vocab_size).astype(np.int32)
            self.output_counts.lend(slot).copy_(torch.from_numpy(counts))

    def _ids(self, ids: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(ids, np.int64)).to(self.device)

    def rows(self, batch: BatchMetadata) -> SampleRows:
        """The sampled rows of `batch` with their settings."""
        host_slots = batch.host["slots"][batch.host["sample_reqs"]]
        uses = self.uses[host_slots]
        reqs = batch.sample_reqs.long()
        slots = batch.slots[reqs].long()
        offsets = torch.arange(reqs.shape[0], device=self.device) - batch.sample_indptr[reqs]
        ints = self.ints[slots]
        return SampleRows(
            slots=slots,
            reqs=reqs,
            offsets=offsets,
            positions=batch.output_pos[reqs] + offsets.to(torch.int32),
            inv_temperature=self.floats[slots, INV_TEMPERATURE],
            seeds=Seeds(ints[:, SEED_LO], ints[:, SEED_HI]),
            host_slots=host_slots,
            uses=uses,
            all_uses=int(np.bitwise_or.reduce(uses, initial=0)),
        )

    def observe(self, batch: BatchMetadata, verdict: Verdict) -> None:
        """Counts what the step emitted, for the requests with penalties."""
        host_slots = batch.host["slots"]
        asking = np.flatnonzero(self.uses[host_slots] & PENALTIES)
        if asking.size == 0:
            return
        index = torch.from_numpy(asking).to(self.device)
        tokens = verdict.tokens[index].long().clamp_(min=0)  # [n, K + 1]
        emitted = torch.arange(tokens.shape[1], device=self.device) < verdict.num_emitted[index, None]
        places = self.output_counts.index_of(host_slots[asking])[:, None] * self.vocab_size + tokens
        counts = self.output_counts.rows.view(-1)
        counts.scatter_add_(0, places.flatten(), emitted.to(torch.int32).flatten())


def _uses(params: SamplingParams) -> int:
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    sampled = params.temperature > 0  # below, no cut removes the argmax, so greedy rows need none
    return (
        SAMPLED * sampled
        | SEEDED * (params.seed is not None)
        | FORBIDDEN * (params.allowed_token_ids is not None or bool(params.banned_token_ids))
        | MIN_TOKENS * (params.min_tokens > 0)
        | BIAS * bool(params.logit_bias)
        | PENALTIES * (penalties != (1, 0, 0))
        | MIN_P * (sampled and params.min_p > 0)
        | TOP * (sampled and (params.top_k > 0 or params.top_p < 1))
        | LOGPROBS * (params.logprobs is not None)
    )
