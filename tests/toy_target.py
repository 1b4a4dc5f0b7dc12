"""A target whose logits depend on the last token alone, and a loop that verifies drafts against it.

What the engine does around `Verifier`, without a model or a scheduler: enough to compare texts with and without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from sampling_batches import sampled_batch
from sonar_engine.config import SpeculativeConfig
from sonar_engine.drafters.base import Draft
from sonar_engine.sampling.state import SamplingState
from sonar_engine.types import SamplingParams
from sonar_engine.verification.verifier import Verifier

Propose = Callable[[int, list[int]], list[int]]  # (request, its output so far) -> draft tokens


def toy_logits(vocab_size: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    """[V, V]: row t holds the logits after token t."""
    return torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def no_drafts(request: int, output: list[int]) -> list[int]:
    return []


class ToyLoop:
    """Runs requests to `num_tokens` each. Request i sits in `slots[i]`; its prompt is `prompt`."""

    def __init__(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        *,
        slots: Sequence[int] | None = None,
        prompt: Sequence[int] = (1, 2, 3),
        eos_token_ids: Sequence[int] = (0,),
        seeds: Sequence[int] | None = None,
        config: SpeculativeConfig | None = None,
    ) -> None:
        self.logits = logits
        self.config = config
        self.params = params
        self.slots = list(range(len(params))) if slots is None else list(slots)
        self.prompt = list(prompt)
        self.seeds = list(range(len(params))) if seeds is None else list(seeds)
        self.state = SamplingState(max(self.slots) + 1, logits.shape[1], "cpu", eos_token_ids)
        self.outputs: list[list[int]] = [[] for _ in params]
        self.logprobs: list[list[tuple[float, int, list[int]]]] = [[] for _ in params]
        self.num_steps = 0
        self.num_accepted = 0
        for request in range(len(params)):
            self.admit(request)

    def admit(self, request: int, slot: int | None = None) -> None:
        """Enter a slot, at first or after a preemption."""
        self.slots[request] = self.slots[request] if slot is None else slot
        history = (np.array(self.prompt, np.int32), np.array(self.outputs[request], np.int32))
        self.state.admit(self.slots[request], self.params[request], *history, params_seed=self.seeds[request])

    def run(self, num_tokens: int, propose: Propose = no_drafts) -> list[list[int]]:
        while running := [i for i, output in enumerate(self.outputs) if len(output) < num_tokens]:
            self.step(running, [propose(i, self.outputs[i]) for i in running])
        self.outputs = [output[:num_tokens] for output in self.outputs]
        return self.outputs

    def step(self, running: Sequence[int], drafts: Sequence[list[int]]) -> None:
        slots = [self.slots[i] for i in running]
        batch = sampled_batch(slots, [len(each) for each in drafts], [len(self.outputs[i]) for i in running])
        last = [(self.prompt + self.outputs[i])[-1] for i in running]
        rows = [token for first, each in zip(last, drafts, strict=True) for token in [first, *each]]
        most = max(len(each) for each in drafts)
        padded = [each + [-1] * (most - len(each)) for each in drafts]
        draft = Draft(torch.tensor(padded, dtype=torch.int32).reshape(len(drafts), most)) if most else None
        verdict, logprobs = Verifier(self.state, config=self.config).verify(self.logits[rows].clone(), batch, draft)
        self.state.observe(batch, verdict)
        self.num_steps += 1
        for row, i in enumerate(running):
            count = int(verdict.num_emitted[row])
            self.num_accepted += count - 1
            self.outputs[i] += verdict.tokens[row, :count].tolist()
            if logprobs is not None:
                first = int(batch.sample_indptr[row])
                for at in range(first, first + count):
                    entry = (float(logprobs.logprobs[at]), int(logprobs.ranks[at]), logprobs.top_ids[at].tolist())
                    self.logprobs[i].append(entry)


def corrupted(texts: Sequence[list[int]], num_drafts: int, vocab_size: int, seed: int = 5) -> Propose:
    """Proposes what `texts` say comes next, wrong in a third of the tokens, in varying number (0 to `num_drafts`)."""
    random = np.random.default_rng(seed)

    def propose(request: int, output: list[int]) -> list[int]:
        ahead = texts[request][len(output) : len(output) + int(random.integers(0, num_drafts + 1))]
        return [token if random.random() < 2 / 3 else int(random.integers(vocab_size)) for token in ahead]

    return propose
