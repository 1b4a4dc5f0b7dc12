"""What the commands print for people: progress bars on stderr, and only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

ProgressCallback = Callable[[str, int, int], None]  # (what, done, total)

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
