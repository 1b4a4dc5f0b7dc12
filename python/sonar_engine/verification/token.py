"""Verification of a chain of drafts against the target, without loss.

Requests with a seed, or at temperature 0, and all drafts without probabilities go by *sample and match*: the target's
own choice at every position is drawn with the request's own noise, and a draft is accepted while it equals it. So the
text is the text without drafts, at any draft length. For a draft that was chosen without chance this is also the token
rule in law: it is accepted with probability target_probs[x], else the rest of the target's distribution is drawn from.

Sampled drafts of unseeded requests go by the token rule (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023,
arXiv 2302.01318), which accepts more of them.
"""

from __future__ import annotations

import numpy as np
import torch
from sonar_kernels import TokenRule, accept

from sonar_engine._scheduler import CpuKernels
from sonar_engine.drafters.base import Draft, Verdict
from sonar_engine.sampling import logprobs, processors
from sonar_engine.sampling.coins import RECOVER, accept_coins
from sonar_engine.sampling.logprobs import LogprobTensors
from sonar_engine.sampling.sampler import Sampler
from sonar_engine.sampling.state import SAMPLED, SEEDED, SampleRows, SamplingState
from sonar_engine.step_buffers import BatchMetadata


class Verifier:
    """Decides what every sampled row of a batch emits, with the settings that `state` holds of its requests."""

    def __init__(self, state: SamplingState, kernels: CpuKernels | None = None) -> None:
        """`kernels`: the model's CPU kernels, so that sampling shares their threads."""
        self._state = state
        self._sampler = Sampler(state.device, kernels)

    @torch.inference_mode()
    def verify(
        self, logits: torch.Tensor, batch: BatchMetadata, draft: Draft | None
    ) -> tuple[Verdict, LogprobTensors | None]:
        """The target's logits fp32 [S, V] at `batch.sample_rows` -> what is emitted. Changes `logits` in place.

        `draft` holds what was put into the batch (None: no row has drafts). The second result is None when no request
        of the batch asked for logprobs. Nothing here waits for the device.
        """
        rows = self._state.rows(batch)
        raw = logprobs.keep_raw(logits, rows, self._state)
        draft_tokens = draft.tokens[:, : batch.max_draft_tokens] if draft and batch.max_draft_tokens else None
        processors.process(logits, rows, self._state, draft_tokens)
        target_tokens = self._sampler.sample(logits, rows)
        if draft is None or draft_tokens is None:
            verdict = _without_drafts(target_tokens, batch)
        else:
            rule = _token_rule(logits, batch, draft, rows, self._state)
            verdict = Verdict(*accept(draft_tokens, batch.num_draft_tokens, batch.sample_indptr, target_tokens, rule))
        return verdict, None if raw is None else logprobs.compute(raw, rows, verdict)


def _without_drafts(target_tokens: torch.Tensor, batch: BatchMetadata) -> Verdict:
    if batch.num_sample_rows == batch.num_reqs:
        return Verdict(torch.ones_like(target_tokens), target_tokens[:, None])
    num_emitted = batch.sample_indptr.diff()
    tokens = target_tokens.new_full((batch.num_reqs, 1), -1)
    tokens[batch.sample_reqs, 0] = target_tokens
    return Verdict(num_emitted, tokens)


def _token_rule(
    logits: torch.Tensor, batch: BatchMetadata, draft: Draft, rows: SampleRows, state: SamplingState
) -> TokenRule | None:
    """The token rule's inputs for unseeded sampled requests whose drafts have probabilities; None without any."""
    if draft.probs is None:
        return None
    num_decode, width = batch.num_decode_reqs, batch.max_draft_tokens
    uses = state.uses[batch.host["slots"][:num_decode]]
    drafted = batch.host["num_draft_tokens"][:num_decode] > 0
    requests = np.flatnonzero(((uses & (SAMPLED | SEEDED)) == SAMPLED) & drafted)
    if requests.size == 0:
        return None
    index = torch.from_numpy(requests).to(logits.device)
    first = batch.sample_indptr[index].long()  # sampled row of the first draft
    steps = torch.arange(width, device=logits.device)
    verified = (first[:, None] + steps).clamp_(max=logits.shape[0] - 1)
    scaled = logits[verified] * rows.inv_temperature[first, None, None]
    positions = rows.positions[first]
    seeds = rows.seeds.rows(first)
    recover = seeds.for_purpose(RECOVER)
    return TokenRule(
        requests=index.to(torch.int32),
        target_probs=scaled.softmax(dim=2),
        draft_probs=draft.probs[:, :width],
        accept_coins=accept_coins(seeds, positions[:, None] + steps.to(torch.int32)),
        seed_lo=recover.lo,
        seed_hi=recover.hi,
        positions=positions,
    )
