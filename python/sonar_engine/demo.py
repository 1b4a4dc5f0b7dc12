"""`make demo`: the default model answers three prompts, with the head that comes with it and without.

Where no head comes with it, n-gram drafting speeds up a text that repeats itself.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import zip_longest

from sonar_engine.cli.session import Session, open_session
from sonar_engine.config import EngineConfig, SpeculativeConfig
from sonar_engine.drafters.shipped import shipped_line, with_shipped_drafter
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
    try:
        config = with_shipped_drafter(EngineConfig(), "fixed")
        line = shipped_line(config)
        if line is None:
            ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
            config = config.model_copy(update={"speculative": ngram})
        with open_session(config, lines_without_terminal=True) as session:
            info = session.engine.info
            print(f"Sonar Engine {info.version}: {info.model_name}, {info.dtype} on {info.device}\n")
            prompts = [_answer(session, question) for question in QUESTIONS]
            if line is None:
                _show_lookups(session)
            else:
                print(f"{line}\n", flush=True)
                _summarise("MTP head", [_run_pair(session, prompt, ANSWER_LEN) for prompt in prompts])
    except SonarError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _answer(session: Session, question: str) -> list[int]:
    """Shows the answer, without drafting. The prompt's tokens."""
    print(f"> {question}\n", flush=True)
    prompt = session.encode([{"role": "user", "content": question}])
    params = SamplingParams(temperature=0.2, top_p=0.9, seed=0, max_tokens=ANSWER_LEN, speculative_enabled=False)
    timed = _timed(session, prompt, params, show=True)
    print(f"\n({len(timed.completion.token_ids)} tokens, {timed.tokens_per_second:.0f} tokens/s)\n", flush=True)
    return prompt


def _timed(session: Session, prompt: list[int], params: SamplingParams, show: bool = False) -> Timed:
    def write(text: str) -> None:
        if show:
            sys.stdout.write(text)
            sys.stdout.flush()

    started = time.perf_counter()
    completion = session.stream(prompt, params, write)
    return Timed(completion, time.perf_counter() - started)


@dataclass(frozen=True)
class Pair:
    """The fastest run of one prompt at temperature 0 without drafts and with them."""

    without: Timed
    drafting: Timed


def _run_pair(session: Session, prompt: list[int], max_tokens: int, show: bool = False) -> Pair:
    drafting = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    plain = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculative_enabled=False)
    with_drafts = [_timed(session, prompt, drafting, show=show)]
    without = [_timed(session, prompt, plain)]
    for _ in range(RUNS - 1):
        with_drafts.append(_timed(session, prompt, drafting))
        without.append(_timed(session, prompt, plain))
    return Pair(min(without, key=lambda t: t.seconds), min(with_drafts, key=lambda t: t.seconds))


def _show_lookups(session: Session) -> None:
    print(f"> {REPEATING_PROMPT}", flush=True)
    pair = _run_pair(session, session.encode(REPEATING_PROMPT), REPEATING_LEN, show=True)
    print("\n")
    _summarise("n-gram drafting", [pair])


def _summarise(name: str, pairs: list[Pair]) -> None:
    """Speculation off and on, over all prompts; the engine gives the same tokens either way."""
    slow, fast = (_rate([getattr(pair, side) for pair in pairs]) for side in ("without", "drafting"))
    drafted = [pair.drafting.completion.metrics.speculation for pair in pairs]
    num_steps = sum(each.num_spec_steps for each in drafted)
    accepted = sum(each.num_accepted_draft_tokens for each in drafted)
    same = all(pair.drafting.completion.token_ids == pair.without.completion.token_ids for pair in pairs)
    shares = " ".join(f"{share:.2f}" for share in accepted_by_position([d.acceptance_histogram for d in drafted]))
    print(f"{'speculation off':19} {slow:6.0f} tokens/s")
    print(f"{name:19} {fast:6.0f} tokens/s, {fast / slow:.2f} times as fast")
    print(f"acceptance length   {1 + accepted / max(num_steps, 1):6.2f} tokens a step that drafted")
    print(f"by position           {shares or '-'}")
    print(f"output              {'the same tokens' if same else 'differs'}")


def _rate(runs: list[Timed]) -> float:
    """Tokens a second over all of them."""
    return sum(len(run.completion.token_ids) for run in runs) / sum(run.seconds for run in runs)


def accepted_by_position(histograms: list[list[int]]) -> list[float]:
    """The share of all steps that drafted which accepted a draft at each position; a histogram: steps by accepted."""
    counts = [sum(column) for column in zip_longest(*histograms, fillvalue=0)]
    total = sum(counts)
    return [sum(counts[position:]) / total for position in range(1, len(counts))] if total else []


if __name__ == "__main__":
    main()
