"""The interface that every way of speculating shares. A drafter specialises forward calls only: sampling, logits
processing, verification, page allocation and scheduling are written once, elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from sonar_engine.device import HostCopy
from sonar_engine.step_buffers import BatchMetadata


@dataclass(frozen=True)
class Draft:
    """Draft tokens of one step, a chain a row. D = decode rows, K = most drafts of any row, W = the draft's vocabulary.

    `probs` is the distribution each token was drawn from, [D, K, W] fp32, finite; None: chosen without chance
    (one-hot). The verifier trusts it: a draft drawn from another distribution changes the text's law.
    Tokens with `probs` must be drawn with noise that no other step uses: `sampling.coins.draft_seeds`.
    `token_map` int32 [W] is the target id of each draft id where W is a reduced vocabulary, the same tensor in every
    step; None: W is the target's. `tokens` are target ids always.
    Row d uses its first `batch.num_draft_tokens[d]` columns; the rest is undefined.
    """

    tokens: torch.Tensor  # int32 [D, K]
    probs: torch.Tensor | None = None
    token_map: torch.Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """What verification decided, on the device. R = rows of the batch, K + 1 = most tokens of any row.

    `num_emitted[r]` is 0 for a row that did not sample, else accepted drafts + 1.
    `tokens[r, :num_emitted[r]]` are the accepted drafts, then the recovered or bonus token.
    """

    num_emitted: torch.Tensor  # int32 [R]
    tokens: torch.Tensor  # int32 [R, K + 1]
    on_host: HostCopy | None = None  # num_emitted and tokens on their way there

    def host_counts(self) -> np.ndarray:
        """`num_emitted` on the host. Waits for verification, not for what has been queued behind it."""
        return self.num_emitted.cpu().numpy() if self.on_host is None else self.on_host.wait()[0]


class Drafter(Protocol):
    """Proposes tokens for the target to verify. Called by `Engine.step` in this order, every step."""

    @property
    def needs_hidden(self) -> Literal["none", "last", "aux"]:
        """Which of the target's hidden states `ingest` reads: none, the last layer's, or chosen layers'."""
        ...

    @property
    def runs_on(self) -> Literal["leader", "all"]:
        """Which tensor-parallel ranks run it."""
        ...

    @property
    def kv_layers(self) -> int:
        """Layers of its own in the KV cache."""
        ...

    def draft_lens(self) -> np.ndarray | None:
        """Most drafts each slot can take in the coming step, int32 [max_num_seqs]; None: no drafts at all.

        Called before the step is planned; the plan may grant fewer.
        """
        ...

    def propose(self, batch: BatchMetadata) -> Draft | None:
        """Drafts for the decode rows of `batch`, at least `batch.num_draft_tokens` each; None when there are none.

        Called every step: the place to take note of admissions and new pages.
        """
        ...

    def ingest(self, batch: BatchMetadata, hidden: torch.Tensor, verdict: Verdict) -> None:
        """The target has run: hidden [T, H] its final hidden states (post-norm), `verdict` what was accepted.

        Called every step that is not reverted, except under the schedule `plain`. Whether the step will be committed
        is not known yet: a drafter that remembers lengths must bear to see the same rows again.
        """
        ...

    def admit(self, slot: int, request_id: int, speculate: int) -> None:
        """A request entered `slot` (again, after a preemption); `speculate` caps its drafts, 0 = none.

        Before `propose` of the step in which it first runs; `batch.num_computed_tokens` tells its prefix hit there.
        """
        ...
