"""A file of JSON lines that only grows. A line torn by a kill is dropped when the file is opened again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sonar_engine.errors import TrainingError
from sonar_engine.files import told


class Journal:
    """Opens `path` for appending, behind its last whole line. Close it, or use it as a context."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("ab+", buffering=0)
            self._truncate(_whole_lines(self._file))

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def append(self, record: dict[str, Any]) -> None:
        """One line, whole or not at all. Raises StorageError where the file system refuses."""
        line = (json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
        try:
            with told(self._path):
                written = 0
                while written < len(line):
                    written += self._file.write(line[written:])
        except BaseException:
            self._truncate(self._size)
            raise
        self._size += len(line)

    def keep(self, num_lines: int) -> None:
        """Drops all lines but the first `num_lines`."""
        self._file.seek(0)
        size = sum(len(self._file.readline()) for _ in range(num_lines))
        self._truncate(size)

    def _truncate(self, size: int) -> None:
        self._file.truncate(size)
        self._file.seek(size)
        self._size = size

    def close(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal, in order; none where there is no file. Raises TrainingError for a damaged line."""
    if not path.exists():
        return
    with told(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError:
                raise TrainingError(f"{path}:{number}: not JSON; the file is damaged, make it again") from None


def _whole_lines(file: BinaryIO) -> int:
    """Bytes up to the end of the last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
