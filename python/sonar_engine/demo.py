"""`make demo`: the default model answers three prompts, then n-gram drafting speeds up a text that repeats itself."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from sonar_engine.cli.session import Session, open_session
from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.errors import SonarError
from sonar_engine.types import Completion, SamplingParams

QUESTIONS = (
    "What makes the sky blue? Answer in two sentences.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Give me three ideas for a rainy Sunday afternoon with two children.",
)
ANSWER_LEN = 96
REPEATING_PROMPT = (
    "The weather of the year, month by month.\n"
    "January: mist in the morning, sun in the afternoon, clear sky at night.\n"
    "February: mist in the morning, sun in the afternoon, clear sky at night.\n"
    "March: mist in the morning, sun in the afternoon, clear sky at night.\n"
)
REPEATING_LEN = 192
RUNS = 3  # of each, in turn; the fastest counts


@dataclass(frozen=True)
class Timed:
    """One completion and its seconds from submission to the last token."""

    completion: Completion
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.completion.token_ids) / self.seconds


def main() -> None:
    config = EngineConfig(speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=4))
    try:
        with open_session(config, lines_without_terminal=True) as session:
            info = session.engine.info
            print(f"Sonar Engine {info.version}: {info.model_name}, {info.dtype} on {info.device}\n")
            for question in QUESTIONS:
                _answer(session, question)
            _show_drafting(session)
    except SonarError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _answer(session: Session, question: str) -> None:
    print(f"> {question}\n", flush=True)
    params = SamplingParams(temperature=0.2, top_p=0.9, seed=0, max_tokens=ANSWER_LEN, speculative_enabled=False)
    timed = _timed(session, session.encode([{"role": "user", "content": question}]), params, show=True)
    print(f"\n({len(timed.completion.token_ids)} tokens, {timed.tokens_per_second:.0f} tokens/s)\n", flush=True)


def _timed(session: Session, prompt: list[int], params: SamplingParams, show: bool = False) -> Timed:
    def write(text: str) -> None:
        if show:
            sys.stdout.write(text)
            sys.stdout.flush()

    started = time.perf_counter()
    completion = session.stream(prompt, params, write)
    return Timed(completion, time.perf_counter() - started)


def _show_drafting(session: Session) -> None:
    """The same prompt with n-gram drafting and without; the engine gives the same tokens either way."""
    prompt = session.encode(REPEATING_PROMPT)
    drafting = SamplingParams(temperature=0.0, max_tokens=REPEATING_LEN)
    plain = SamplingParams(temperature=0.0, max_tokens=REPEATING_LEN, speculative_enabled=False)
    print(f"> {REPEATING_PROMPT}", flush=True)
    with_drafts = [_timed(session, prompt, drafting, show=True)]
    without = [_timed(session, prompt, plain)]
    for _ in range(RUNS - 1):
        with_drafts.append(_timed(session, prompt, drafting))
        without.append(_timed(session, prompt, plain))
    fast, slow = min(with_drafts, key=lambda t: t.seconds), min(without, key=lambda t: t.seconds)
    length = fast.completion.metrics.speculation.mean_acceptance_length or 1.0
    same = fast.completion.token_ids == slow.completion.token_ids
    gain = slow.seconds / fast.seconds
    print("\n")
    print(f"speculation off     {slow.tokens_per_second:6.0f} tokens/s")
    print(f"n-gram drafting     {fast.tokens_per_second:6.0f} tokens/s, {gain:.2f} times as fast")
    print(f"acceptance length   {length:6.2f} tokens a step that drafted")
    print(f"output              {'the same tokens' if same else 'differs'}")


if __name__ == "__main__":
    main()
