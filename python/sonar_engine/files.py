"""Files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from sonar_engine.errors import StorageError, reason

_GIB = 2**30


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside `path` to write to. It becomes `path` at the end, and is removed when anything fails.

    The file has the permissions of any new one, also where a library's writer puts a private file in its place.
    Raises StorageError where the file system refuses.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)  # a killed run's
            part.touch()
            mode = part.stat().st_mode
            yield part
            if part.stat().st_mode != mode:
                part.chmod(mode)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turns what the file system refuses into a StorageError that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or reason(error)
        raise StorageError(f"{path} cannot be written: {why}; what was there is unharmed, so run this again") from None


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as part:
        part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json_file(path: Path, made_by: str) -> dict[str, Any]:
    """Raises StorageError where there is none, or a damaged one; `made_by` is the command that writes it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StorageError(f"{path} is missing; make it with `{made_by}`") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path} cannot be read: {reason(error)}; make it again with `{made_by}`") from None
    if not isinstance(value, dict):
        raise StorageError(f"{path} must hold a JSON object; make it again with `{made_by}`")
    return value


def sha256_of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check_room(folder: Path, num_bytes: int, what: str) -> None:
    """Raises StorageError when the file system of `folder` has fewer than `num_bytes` free."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise StorageError(
            f"{what} needs {num_bytes / _GIB:.2f} GiB in {folder}, and {free / _GIB:.2f} GiB are free; "
            "make room, or give a folder on another disk"
        )
