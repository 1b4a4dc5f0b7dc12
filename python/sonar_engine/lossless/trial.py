"""The prompts as one engine completes them: at temperature 0, seeded at temperature 1, and many times unseeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sonar_engine.engine import Engine, Progress
from sonar_engine.errors import InvalidRequestError
from sonar_engine.types import Completion, EngineStats, SamplingParams

LAW_TOKENS = 4  # of each sample: the first comes from the prompt's own pass, the others may be drafted
_ROOM_FOR_DRAFTS = 2  # tokens generated beyond those, so that the last ones are drafted as well
_LAW_TOP_K = (0, 4)  # of each law: a whole one, and a narrow one, of which a given number of samples tells more
_TOP_LOGPROBS = 20


class Law(NamedTuple):
    """What follows a prompt at temperature 1."""

    prompt: list[int]
    top_k: int  # 0: off

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(top_k=self.top_k, max_tokens=LAW_TOKENS + _ROOM_FOR_DRAFTS, ignore_eos=True)


@dataclass(frozen=True)
class Plan:
    """What is run with speculation off and then on. `num_samples` are spread over a few of the shortest prompts."""

    prompts: list[list[int]]
    max_tokens: int
    num_samples: int

    @property
    def seeds(self) -> list[int]:
        return list(range(1, len(self.prompts) + 1))

    @property
    def laws(self) -> list[Law]:
        if self.num_samples == 0:
            return []
        shortest = sorted(self.prompts, key=len)
        return [Law(shortest[index % len(shortest)], top_k) for index, top_k in enumerate(_LAW_TOP_K)]


@dataclass(frozen=True)
class Acceptance:
    """Of one part of a trial. `accepted_per_pos[j]` counts drafts accepted at position j, from 0."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()

    @classmethod
    def between(cls, before: EngineStats, after: EngineStats) -> Acceptance:
        return cls(
            after.num_drafts - before.num_drafts,
            after.num_draft_tokens - before.num_draft_tokens,
            after.num_accepted_tokens - before.num_accepted_tokens,
            tuple(b - a for a, b in zip(before.accepted_per_pos, after.accepted_per_pos, strict=True)),
        )

    @property
    def mean_length(self) -> float | None:
        """Tokens a verification emitted, the bonus token counted; 1 means no gain."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def rate_per_pos(self) -> list[float]:
        """Share of the verifications that accepted a draft at each position."""
        return [count / self.num_drafts for count in self.accepted_per_pos] if self.num_drafts else []


@dataclass(frozen=True)
class Part:
    """Completions in the order of the prompts."""

    completions: list[Completion]
    acceptance: Acceptance


@dataclass(frozen=True)
class Trial:
    """`samples` int32 [N, LAW_TOKENS] of each of the plan's laws."""

    greedy: Part
    seeded: Part
    samples: list[np.ndarray]
    law_acceptance: Acceptance


def run_trial(engine: Engine, plan: Plan, name: str, progress: Progress) -> Trial:
    """Raises InvalidRequestError, before anything runs, for a prompt that leaves no room for what it is to be asked."""
    for law in plan.laws:
        _check_room(engine, law)
    greedy = SamplingParams(temperature=0.0, max_tokens=plan.max_tokens, logprobs=_TOP_LOGPROBS)
    seeded = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=plan.max_tokens, logprobs=_TOP_LOGPROBS)
        for seed in plan.seeds
    ]
    greedy_part = _complete(engine, plan, [greedy] * len(seeded), f"{name}, temperature 0", progress)
    seeded_part = _complete(engine, plan, seeded, f"{name}, seeded at temperature 1", progress)
    before = engine.stats()
    samples = _sample(engine, plan, f"{name}, sampling at temperature 1", progress)
    return Trial(greedy_part, seeded_part, samples, Acceptance.between(before, engine.stats()))


def _check_room(engine: Engine, law: Law) -> None:
    try:
        engine.validate(law.prompt, law.params)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"the samples: {error}; or ask for 0 samples", param=error.param) from error


def _complete(engine: Engine, plan: Plan, params: Sequence[SamplingParams], what: str, progress: Progress) -> Part:
    before, most = engine.stats(), len(plan.prompts) * plan.max_tokens

    def on_text(index: int, text: str) -> None:
        progress(what, engine.stats().generation_tokens - before.generation_tokens, most)

    completions = engine.generate(plan.prompts, params, on_text)
    progress(what, most, most)
    return Part(completions, Acceptance.between(before, engine.stats()))


def _sample(engine: Engine, plan: Plan, what: str, progress: Progress) -> list[np.ndarray]:
    samples: list[np.ndarray] = []
    for law in plan.laws:
        left = plan.num_samples // len(_LAW_TOP_K)
        rows: list[list[int]] = []
        while left > 0:
            count = min(left, engine.config.max_num_seqs)
            rows += [
                completion.token_ids[:LAW_TOKENS] for completion in engine.generate([law.prompt] * count, law.params)
            ]
            left -= count
            progress(what, sum(map(len, samples)) + len(rows), plan.num_samples)
        samples.append(np.array(rows, np.int32).reshape(len(rows), LAW_TOKENS))
    return samples
