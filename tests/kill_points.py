"""Real kills: the command `sonar` in a process of its own that sends itself SIGKILL at a given point."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from sonar_engine.training.journal import Journal

_TORN_BYTES = 3  # that the last line of a journal lacks
_CONTEXT = multiprocessing.get_context("forkserver")
# Loaded once, in a process that then forks: a second for each start instead of many.
_CONTEXT.set_forkserver_preload(
    [f"sonar_engine.{name}" for name in ("cli.train", "training.pipeline", "training.fit", "training.evaluate")]
)


class KillPoint(NamedTuple):
    """The end of the `call`-th call of `where`, "module:function" or "module:Class.function".

    A file that a module's `replacing` was to write is half there, and so is the line that `Journal.append` wrote.
    """

    where: str
    call: int = 1


def run_sonar(folder: Path, *arguments: str, kill: KillPoint | None = None) -> int:
    """Runs `sonar` with `folder` as its working directory; its exit code, -SIGKILL where it was killed."""
    process = _CONTEXT.Process(target=_run, args=(folder, arguments, kill))
    process.start()
    process.join()
    code = process.exitcode
    assert code is not None
    return code


def _run(folder: Path, arguments: tuple[str, ...], kill: KillPoint | None) -> None:
    from sonar_engine.cli import main

    os.chdir(folder)
    sys.argv = ["sonar", *arguments]
    if kill is not None:
        _arm(kill)
    main()


def _arm(kill: KillPoint) -> None:
    module, _, path = kill.where.partition(":")
    *parents, name = path.split(".")
    owner: Any = reduce(getattr, parents, importlib.import_module(module))
    original, calls = getattr(owner, name), count(1)

    def dying(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        if next(calls) != kill.call:
            return result
        if isinstance(result, AbstractContextManager):
            return _torn(result)
        if arguments and isinstance(arguments[0], Journal):
            file = arguments[0]._file
            os.truncate(file.fileno(), os.fstat(file.fileno()).st_size - _TORN_BYTES)
        _die()
        return None

    setattr(owner, name, dying)


@contextmanager
def _torn(replacing: AbstractContextManager[Path]) -> Iterator[Path]:
    with replacing as part:
        yield part
        os.truncate(part, part.stat().st_size // 2)
        _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
