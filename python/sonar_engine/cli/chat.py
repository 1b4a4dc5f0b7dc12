"""`sonar chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer

from sonar_engine.cli.options import config_options, load_drafting_options
from sonar_engine.cli.session import Messages, Session, checked_settings, open_session
from sonar_engine.cli.terminal import note, note_drafter
from sonar_engine.config import EngineConfig
from sonar_engine.errors import InvalidRequestError
from sonar_engine.response_metrics import response_metrics
from sonar_engine.types import Completion, SamplingParams

HELP = "/exit ends, /reset forgets the conversation, Ctrl-C ends an answer"


@config_options(EngineConfig, without=("seed",))
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="System message")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens an answer; default: what fits")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the most likely token")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers")] = None,
    **options: Any,
) -> None:
    """Talk with a model. Earlier turns stay in the prefix cache."""
    config = load_drafting_options(options, "fixed").engine
    settings = checked_settings(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    note_drafter(config)
    with open_session(config) as session:
        params = session.sampling(settings)
        # settings that this model cannot follow, or a template that no turn could use, end it here
        session.engine.validate(session.encode([{"role": "user", "content": "Hello"}]), params)
        note(f"{session.engine.info.model_name}: {HELP}")
        converse(session, params, [{"role": "system", "content": system}] if system else [])


def converse(session: Session, params: SamplingParams, opening: Messages) -> None:
    """Reads turns until /exit or the end of input; an answer that was cut short stays in the conversation."""
    messages = list(opening)
    while (line := _read_line()) is not None:
        text = line.strip()
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            messages = list(opening)
        elif text == "/help":
            note(HELP)
        elif text:
            messages.append({"role": "user", "content": text})
            answer = _answer(session, params, messages)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _answer(session: Session, params: SamplingParams, messages: Messages) -> str | None:
    """Prints the answer as it comes and returns its text; None when it could not begin."""
    said: list[str] = []

    def write(text: str, check: Callable[[], None]) -> None:
        said.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()
        check()

    completion: Completion | None = None
    try:
        with interrupt_between_steps() as check:
            completion = session.stream(session.encode(messages), params, lambda text: write(text, check))
    except KeyboardInterrupt:
        pass  # the engine has aborted it; what was said stands
    except InvalidRequestError as error:
        note(f"error: {error}; /reset starts anew")
        return None
    print()
    if completion is not None:
        note(_summary(completion))
    return "".join(said)


@contextmanager
def interrupt_between_steps() -> Iterator[Callable[[], None]]:
    """Yields a check that raises KeyboardInterrupt if Ctrl-C came; a second Ctrl-C raises at once.

    An interrupt in the middle of a step would leave the engine with that step in flight.
    """
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def _summary(completion: Completion) -> str:
    num_tokens = len(completion.token_ids)
    metrics = response_metrics(completion.metrics, num_tokens)
    rate = f", {metrics['tokens_per_second']:.0f} tokens/s" if metrics["tokens_per_second"] else ""
    length = metrics["speculative_decoding"]["mean_acceptance_length"]
    acceptance = f", acceptance length {length:.2f}" if length else ""
    return (
        f"({num_tokens} tokens{rate}{acceptance}, {completion.metrics.num_cached_tokens} prompt tokens from the cache)"
    )
