"""Verification of a chain of drafts against the target: without loss, unless the configuration asks for a lossy rule.

Requests with a seed, or at temperature 0, and all drafts without probabilities go by *sample and match*: the target's
own choice at every position is drawn with the request's own noise, and a draft is accepted while it equals it. So the
text is the text without drafts, at any draft length. For a draft that was chosen without chance this is also the token
rule in law: it is accepted with probability target_probs[x], else the rest of the target's distribution is drawn from.

Sampled drafts of unseeded requests go by block verification (Sun et al., arXiv 2403.10444), which accepts more of them,
or by token verification (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): the law of the
text is the target's.

With `SpeculativeConfig.lossy` requests above temperature 0, seeded ones among them, go by typical acceptance (Cai et
al. 2024, arXiv 2401.10774): lossy, so their text depends on the drafts. Temperature 0 stays exact.
"""

from __future__ import annotations

import torch
from sonar_kernels import DraftVocabulary, SampledRule, TypicalRule, accept

from sonar_engine._scheduler import CpuKernels
from sonar_engine.config import SpeculativeConfig
from sonar_engine.drafters.base import Draft, Verdict
from sonar_engine.sampling import logprobs, processors
from sonar_engine.sampling.logprobs import LogprobTensors
from sonar_engine.sampling.sampler import Sampler
from sonar_engine.sampling.state import SampleRows, SamplingState
from sonar_engine.step_buffers import BatchMetadata
from sonar_engine.verification.rules import check_width, draft_vocabulary, lossy_rule, sampled_rule


class Verifier:
    """Decides what every sampled row of a batch emits, with the settings that `state` holds of its requests."""

    def __init__(
        self, state: SamplingState, kernels: CpuKernels | None = None, config: SpeculativeConfig | None = None
    ) -> None:
        """`kernels`: the model's CPU kernels, so that sampling shares their threads. `config`: which rules apply."""
        self._state = state
        self._sampler = Sampler(state.device, kernels)
        self._config = config or SpeculativeConfig()
        self._token_map: torch.Tensor | None = None  # what `_vocabulary` was built from
        self._vocabulary: DraftVocabulary | None = None

    @torch.inference_mode()
    def verify(
        self, logits: torch.Tensor, batch: BatchMetadata, draft: Draft | None
    ) -> tuple[Verdict, LogprobTensors | None]:
        """The target's logits fp32 [S, V] at `batch.sample_rows` -> what is emitted. Changes `logits` in place.

        `draft` holds what was put into the batch (None: no row has drafts). The second result is None when no request
        of the batch asked for logprobs. Nothing here waits for the device, but for a token map not seen before.
        """
        rows = self._state.rows(batch)
        raw = logprobs.keep_raw(logits, rows, self._state)
        draft_tokens = draft.tokens[:, : batch.max_draft_tokens] if draft and batch.max_draft_tokens else None
        processors.process(logits, rows, self._state, draft_tokens)
        target_tokens = self._sampler.sample(logits, rows)
        if draft is None or draft_tokens is None:
            verdict = _without_drafts(target_tokens, batch)
        else:
            rule = self._rule(logits, batch, draft, rows)
            verdict = Verdict(*accept(draft_tokens, batch.num_draft_tokens, batch.sample_indptr, target_tokens, rule))
        return verdict, None if raw is None else logprobs.compute(raw, rows, verdict)

    def _rule(
        self, logits: torch.Tensor, batch: BatchMetadata, draft: Draft, rows: SampleRows
    ) -> SampledRule | TypicalRule | None:
        """The rule of the rows that do not go by sample and match; None when all do."""
        if self._config.lossy is not None:
            return lossy_rule(logits, batch, rows, self._state, self._config.lossy)
        if draft.probs is None:
            return None
        if draft.token_map is not self._token_map:
            self._vocabulary = (
                None if draft.token_map is None else draft_vocabulary(draft.token_map, self._state.vocab_size)
            )
            self._token_map = draft.token_map
        check_width(draft.probs, self._vocabulary, logits.shape[1])
        block = self._config.verification == "block"
        return sampled_rule(logits, batch, draft, rows, self._state, vocabulary=self._vocabulary, block=block)


def _without_drafts(target_tokens: torch.Tensor, batch: BatchMetadata) -> Verdict:
    if batch.num_sample_rows == batch.num_reqs:
        return Verdict(torch.ones_like(target_tokens), target_tokens[:, None])
    num_emitted = batch.sample_indptr.diff()
    tokens = target_tokens.new_full((batch.num_reqs, 1), -1)
    tokens[batch.sample_reqs, 0] = target_tokens
    return Verdict(num_emitted, tokens)
