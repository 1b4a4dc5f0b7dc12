"""What a comparison found, as data and in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sonar_engine.lossless.law import ALARM, ChiSquare, LawTest, compare_laws
from sonar_engine.lossless.texts import Difference, TextsTest, compare_texts
from sonar_engine.lossless.trial import LAW_TOKENS, Acceptance, Plan, Trial
from sonar_engine.types import EngineInfo


@dataclass(frozen=True)
class Report:
    """`exact`: batch-invariant mode, in which no near tie excuses a difference."""

    info: EngineInfo
    exact: bool
    greedy: TextsTest
    seeded: TextsTest
    law: LawTest
    plan: Plan
    on: Trial

    def texts_passed(self, test: TextsTest) -> bool:
        return all(each.near_tie and not self.exact for each in test.differences)

    @property
    def different(self) -> bool:
        return not (self.texts_passed(self.greedy) and self.texts_passed(self.seeded) and self.law.passed)

    @property
    def drafted(self) -> bool:
        """Whether there was any speculation to compare."""
        parts = (self.on.greedy.acceptance, self.on.seeded.acceptance, self.on.law_acceptance)
        return any(part.num_draft_tokens for part in parts)

    @property
    def passed(self) -> bool:
        return self.drafted and not self.different

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "model": self.info.model_name,
            "dtype": self.info.dtype,
            "drafter": self.info.drafter,
            "num_speculative_tokens": self.info.num_speculative_tokens,
            "lossy": self.info.lossy,
            "batch_invariant": self.exact,
            "greedy": {**self._texts_dict(self.greedy), **_acceptance_dict(self.on.greedy.acceptance)},
            "seeded": {**self._texts_dict(self.seeded), **_acceptance_dict(self.on.seeded.acceptance)},
            "law": {
                "num_samples": sum(map(len, self.on.samples)),
                "num_tokens_each": LAW_TOKENS,
                **asdict(self.law),
                "p_value": self.law.p_value,
                "least_p_value": ALARM,
                "passed": self.law.passed,
                **_acceptance_dict(self.on.law_acceptance),
            },
            "drafted": self.drafted,
            "passed": self.passed,
        }

    def _texts_dict(self, test: TextsTest) -> dict[str, Any]:
        return {**asdict(test), "passed": self.texts_passed(test)}

    def lines(self) -> list[str]:
        """What is printed for people."""
        info = self.info
        mode = "batch-invariant" if self.exact else "not batch-invariant"
        drafter = f"{info.drafter}, K = {info.num_speculative_tokens}{', LOSSY' if info.lossy else ''}"
        result = [f"{info.model_name}, {info.dtype}, {mode}: {drafter}"]
        result += self._texts_lines("temperature 0", self.greedy, self.on.greedy.acceptance)
        result += self._texts_lines("seeded, temperature 1", self.seeded, self.on.seeded.acceptance)
        result += self._law_lines()
        return [*result, self._verdict()]

    def _verdict(self) -> str:
        if self.different:
            why = "; lossy acceptance, as configured, does so above temperature 0" if self.info.lossy else ""
            return f"FAILED: speculation changes what is generated{why}"
        return "passed" if self.drafted else "NOT COMPARED: nothing was drafted; give more or longer prompts"

    def _texts_lines(self, name: str, test: TextsTest, acceptance: Acceptance) -> list[str]:
        verdict = "equal" if not test.differences else f"{len(test.differences)} prompts differ"
        return [
            f"{name}: {verdict}; {test.num_tokens} equal tokens of {test.num_prompts} prompts, "
            f"log-probabilities within {test.max_logprob_difference:.1e}",
            *(f"  {_in_words(each)}" for each in test.differences),
            f"  {_acceptance_line(acceptance)}",
        ]

    def _law_lines(self) -> list[str]:
        law, num_samples = self.law, sum(map(len, self.on.samples))
        if num_samples == 0:
            return ["unseeded, temperature 1: not sampled"]
        head = f"unseeded, temperature 1, {num_samples} samples of {LAW_TOKENS} tokens"
        if law.p_value is None:
            return [f"{head}: too few to compare"]
        sign = ">=" if law.passed else "<"
        return [
            f"{head}: p = {law.p_value:.3g} {sign} {ALARM:g}",
            *(f"  {_test_line(test)}" for test in law.tests),
            f"  {_acceptance_line(self.on.law_acceptance)}",
        ]


def make_report(info: EngineInfo, exact: bool, plan: Plan, off: Trial, on: Trial) -> Report:
    """Compares two trials of one plan; `info` is that of the engine with speculation on."""
    return Report(
        info=info,
        exact=exact,
        greedy=compare_texts(off.greedy.completions, on.greedy.completions, info.dtype, []),
        seeded=compare_texts(off.seeded.completions, on.seeded.completions, info.dtype, plan.seeds),
        law=compare_laws(_groups(plan, off, on)),
        plan=plan,
        on=on,
    )


def _groups(plan: Plan, off: Trial, on: Trial) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """The samples of each law with speculation off and on; laws of one top-k are tested together."""
    groups: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for law, one, two in zip(plan.laws, off.samples, on.samples, strict=True):
        groups.setdefault(f"top-k {law.top_k}" if law.top_k else "all tokens", []).append((one, two))
    return groups


def _acceptance_dict(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "mean_acceptance_length": acceptance.mean_length,
        "acceptance_per_position": acceptance.rate_per_pos,
        "num_draft_tokens": acceptance.num_draft_tokens,
        "num_accepted_tokens": acceptance.num_accepted_tokens,
    }


def _acceptance_line(acceptance: Acceptance) -> str:
    if acceptance.mean_length is None:
        return "nothing was drafted"
    positions = ", ".join(f"{rate:.2f}" for rate in acceptance.rate_per_pos)
    return (
        f"acceptance length {acceptance.mean_length:.2f}; by position {positions}; "
        f"{acceptance.num_accepted_tokens} of {acceptance.num_draft_tokens} drafts accepted"
    )


def _test_line(test: ChiSquare) -> str:
    return (
        f"{test.what}: chi-square {test.chi_square:.1f}, {test.degrees_of_freedom} degrees of freedom, "
        f"p = {test.p_value:.3g}"
    )


def _in_words(difference: Difference) -> str:
    def token(token_id: int | None, logprob: float | None) -> str:
        return "the end" if token_id is None or logprob is None else f"token {token_id} (log-probability {logprob:.4f})"

    tie = "a near tie" if difference.near_tie else "no near tie"
    return (
        f"prompt {difference.prompt}, position {difference.position}: "
        f"off {token(difference.token_off, difference.logprob_off)}, "
        f"on {token(difference.token_on, difference.logprob_on)}; {tie}"
    )
