"""What the commands print for people: progress bars on stderr, only on a terminal, and errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from sonar_engine.config import EngineConfig
from sonar_engine.errors import SonarError

ProgressCallback = Callable[[str, int, int], None]  # (what, done, total)

INTERRUPTED = 130  # 128 + SIGINT, as shells count
LABELS = {"weights": "Loading weights"}  # what the engine reports, in words


@contextmanager
def progress_bars(lines_without_terminal: bool = False) -> Iterator[ProgressCallback]:
    """A callback that shows one bar for each `what`.

    Without a terminal nothing is shown, or with `lines_without_terminal` one line as each `what` begins.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines() if lines_without_terminal else _ignore
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(LABELS.get(what, what), total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield show


def _ignore(what: str, done: int, total: int) -> None:
    """No terminal, no bars."""


class _Lines:
    """One line as each kind of work begins."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._seen:
            self._seen.add(what)
            print(f"{LABELS.get(what, what)} ...", file=sys.stderr, flush=True)


def note(text: str) -> None:
    """A line of our own on stderr, dimmed on a terminal."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}{text}{plain}", file=sys.stderr, flush=True)


def note_drafter(config: EngineConfig) -> None:
    """Notes that the engine will draft with what comes for its model, where it will."""
    from sonar_engine.drafters.shipped import shipped_line

    line = shipped_line(config)
    if line is not None:
        note(line)


def exit_with(error: SonarError, code: int) -> NoReturn:
    """Ends the command with the error in one line and that exit code, or as interrupted where Ctrl-C led to it."""
    if _follows_interrupt(error):
        sys.exit(INTERRUPTED)
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(code)


def _follows_interrupt(error: BaseException | None) -> bool:
    """Whether the error arose while Ctrl-C was ending the work: cleaning up half a step can fail."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False
