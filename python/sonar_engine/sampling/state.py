"""What sampling remembers of each running request, by slot, and the rows of one batch that are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from sonar_engine.device import to_device
from sonar_engine.drafters.base import Verdict
from sonar_engine.errors import ConfigError
from sonar_engine.sampling.coins import Seeds, split_seed
from sonar_engine.sampling.row_pool import RowPool
from sonar_engine.sampling.validation import MAX_LOGIT_BIAS
from sonar_engine.step_buffers import BatchMetadata
from sonar_engine.structured.slots import GrammarSlots
from sonar_engine.types import SamplingParams

# What a request uses: bits of `SamplingState.uses`.
SAMPLED = 1 << 0  # temperature above 0
SEEDED = 1 << 1  # the user gave the seed
FORBIDDEN = 1 << 2  # allowed or banned ids
MIN_TOKENS = 1 << 3
BIAS = 1 << 4
REPETITION = 1 << 5
PENALTIES = 1 << 6  # presence or frequency
MIN_P = 1 << 7
TOP = 1 << 8  # top-k or top-p
LOGPROBS = 1 << 9
GRAMMAR = 1 << 10  # structured output
COUNTED = REPETITION | PENALTIES  # what needs the history
_INT32_MAX = (1 << 31) - 1


class SampleRows:
    """The sampled rows of one batch, S of them: row s decides the output token at `positions[s]` of its request.

    Device tensors are made when they are first asked for, so that a plain batch pays for little.
    """

    def __init__(self, batch: BatchMetadata, state: SamplingState) -> None:
        self._batch = batch
        self._state = state
        # Row s is request s: every request samples one row.
        self._one_each = batch.num_sample_rows == batch.num_reqs and batch.max_draft_tokens == 0
        slots = batch.host["slots"]
        self.host_slots: np.ndarray = slots if self._one_each else slots[batch.host["sample_reqs"]]  # int32 [S]
        self.uses: np.ndarray = state.uses[self.host_slots]  # uint16 [S]
        self.all_uses = int(np.bitwise_or.reduce(self.uses, initial=0))

    def that_use(self, bits: int) -> np.ndarray:
        """Indices of the rows that use any of `bits`, int64, ascending."""
        return np.flatnonzero(self.uses & bits)

    @cached_property
    def reqs(self) -> torch.Tensor:
        """int32 [S], batch rows."""
        return self._batch.sample_reqs

    @cached_property
    def slots(self) -> torch.Tensor:
        """int32 [S]."""
        return self._of_reqs(self._batch.slots)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """int32 [S], 0 for a request's first row, i for the one after its i-th draft."""
        count = self._batch.num_sample_rows
        return torch.arange(count, dtype=torch.int32, device=self.reqs.device) - self._of_reqs(
            self._batch.sample_indptr
        )

    @cached_property
    def positions(self) -> torch.Tensor:
        """int32 [S], output positions."""
        return self._batch.output_pos if self._one_each else self._of_reqs(self._batch.output_pos) + self.offsets

    @cached_property
    def inv_temperature(self) -> torch.Tensor:
        """fp32 [S], 0 = greedy."""
        return self._state.inv_temperature.index_select(0, self.slots)

    @cached_property
    def seeds(self) -> Seeds:
        """[S] each."""
        return Seeds(self._state.seed_lo.index_select(0, self.slots), self._state.seed_hi.index_select(0, self.slots))

    def allowed_by_grammars(self, draft_tokens: torch.Tensor | None) -> torch.Tensor:
        """bool [n, V] on the host, for the n rows that use GRAMMAR; draft_tokens int32 [D, K]."""
        if self._state.grammars is None:
            raise ConfigError("structured output needs a sampling state with grammars")
        return self._state.grammars.masks(self._batch, self.that_use(GRAMMAR), draft_tokens)

    def _of_reqs(self, per_request: torch.Tensor) -> torch.Tensor:
        """[R, or more] -> [S]."""
        if self._one_each:
            return per_request[: self._batch.num_reqs]
        return per_request.index_select(0, self.reqs)


class SamplingState:
    """Per-slot settings on the device, with a host mirror of who uses what.

    A batch in which nobody uses a feature pays nothing for it. `admit` fills a slot, also after a preemption;
    `observe` must follow every step, so that penalties and grammars see what was emitted.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device | str,
        eos_token_ids: Sequence[int],
        grammars: GrammarSlots | None = None,
    ) -> None:
        """`grammars` is what requests with structured output need."""
        device = torch.device(device)
        self.vocab_size = vocab_size
        self.device = device
        self._floats = torch.zeros((6, max_num_seqs), dtype=torch.float32, device=device)
        self.inv_temperature, self.top_p, self.log_min_p = self._floats[:3]
        self.repetition, self.presence, self.frequency = self._floats[3:]
        self._ints = torch.zeros((4, max_num_seqs), dtype=torch.int32, device=device)
        self.top_k, self.seed_lo, self.seed_hi, self.min_tokens = self._ints  # top_k: vocab_size when off
        self.uses = np.zeros(max_num_seqs, np.uint16)
        self.host_top_k = np.zeros(max_num_seqs, np.int64)
        self.num_logprobs = np.zeros(max_num_seqs, np.int64)
        self.forbidden = RowPool(max_num_seqs, vocab_size, torch.bool, device)
        self.ends = RowPool(max_num_seqs, vocab_size, torch.bool, device)  # forbidden below min_tokens
        self.bias_ids = RowPool(max_num_seqs, MAX_LOGIT_BIAS, torch.int64, device)
        self.bias_values = RowPool(max_num_seqs, MAX_LOGIT_BIAS, torch.float32, device)
        self.in_prompt = RowPool(max_num_seqs, vocab_size, torch.bool, device)
        self.output_counts = RowPool(max_num_seqs, vocab_size, torch.float32, device)  # exact to 2**24
        self.grammars = grammars
        self._eos_token_ids = list(eos_token_ids)

    @torch.inference_mode()
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
        min_tokens = min(params.min_tokens, _INT32_MAX)
        self._floats[:, slot] = torch.tensor([inv_temperature, params.top_p, log_min_p, *penalties])
        self._ints[:, slot] = torch.tensor([top_k, seed_lo, seed_hi, min_tokens], dtype=torch.int32)
        self.uses[slot] = _uses(params)
        self.host_top_k[slot] = top_k
        self.num_logprobs[slot] = params.logprobs or 0
        self._admit_masks(slot, params)
        self._admit_bias(slot, params.logit_bias or {})
        self._admit_history(slot, prompt_ids, output_ids)
        if self.grammars is not None:
            self.grammars.admit(slot, params.structured, output_ids)

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
        if self.uses[slot] & COUNTED:
            self.in_prompt.lend(slot)[self._ids(prompt_ids)] = True
            counts = np.bincount(output_ids, minlength=self.vocab_size).astype(np.float32)
            self.output_counts.lend(slot).copy_(torch.from_numpy(counts))

    def _ids(self, ids: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(ids, np.int64)).to(self.device)

    def rows(self, batch: BatchMetadata) -> SampleRows:
        """The sampled rows of `batch` with their settings."""
        return SampleRows(batch, self)

    @torch.inference_mode()
    def observe(self, batch: BatchMetadata, verdict: Verdict) -> None:
        """Counts what the step emitted, for the requests with penalties."""
        host_slots = batch.host["slots"]
        asking = np.flatnonzero(self.uses[host_slots] & COUNTED)
        if asking.size == 0:
            return
        index = to_device(asking, self.device)
        tokens = verdict.tokens[index].long().clamp_(min=0)  # [n, K + 1]
        emitted = torch.arange(tokens.shape[1], device=self.device) < verdict.num_emitted[index, None]
        places = self.output_counts.index_of(host_slots[asking])[:, None] * self.vocab_size + tokens
        counts = self.output_counts.rows.view(-1)
        counts.scatter_add_(0, places.flatten(), emitted.to(counts.dtype).flatten())


def _uses(params: SamplingParams) -> int:
    sampled = params.temperature > 0  # below, no cut removes the argmax, so greedy rows need none
    return (
        SAMPLED * sampled
        | SEEDED * (params.seed is not None)
        | FORBIDDEN * (params.allowed_token_ids is not None or bool(params.banned_token_ids))
        | MIN_TOKENS * (params.min_tokens > 0)
        | BIAS * bool(params.logit_bias)
        | REPETITION * (params.repetition_penalty != 1)
        | PENALTIES * (params.presence_penalty != 0 or params.frequency_penalty != 0)
        | MIN_P * (sampled and params.min_p > 0)
        | TOP * (sampled and (params.top_k > 0 or params.top_p < 1))
        | LOGPROBS * (params.logprobs is not None)
        | GRAMMAR * (params.structured is not None)
    )
