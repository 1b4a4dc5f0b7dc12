"""Tensors of a Hugging Face folder: one model.safetensors, or shards with an index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sonar_engine.errors import ModelLoadError
from sonar_engine.models.model_config import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # buffers that old checkpoints saved; recomputed from the configuration
_FLOATS = ("F64", "F32", "F16", "BF16")
_BLOCK_BYTES = 64 << 20


class SafetensorsCheckpoint:
    """Opens every shard and knows every shape; data is read through the mapping on demand."""

    def __init__(self, folder: str | Path, id_tables: frozenset[str] = frozenset()) -> None:
        """`id_tables` names tensors of int64; all others are floats."""
        folder = Path(folder)
        self._id_tables = id_tables
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._shard_of: dict[str, Any] = {}
        self._stack = ExitStack()
        try:
            for shard in _shards(folder):
                self._add(shard)
            self._check_index(folder)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> SafetensorsCheckpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._shard_of.clear()
        self._stack.close()

    def read(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Blocks of rows of at most 64 MiB: (first row, values in the file's dtype)."""
        try:
            view = self._shard_of[name].get_slice(name)
            shape = self.shapes[name]
            row_elements = max(1, torch.Size(shape[1:]).numel())
            step = max(1, _BLOCK_BYTES // 4 // row_elements)
            for first in range(0, shape[0], step):
                yield first, view[first : min(first + step, shape[0])]
        except SafetensorError as error:
            raise ModelLoadError(f"tensor {name!r} cannot be read: {error}") from None

    def _add(self, path: Path) -> None:
        file = _open_shard(path)
        self._stack.enter_context(file)
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            if name.endswith(_IGNORED_SUFFIXES):
                continue
            if name in self.shapes:
                raise ModelLoadError(f"{path}: tensor {name!r} is in another shard too")
            view = file.get_slice(name)
            dtypes = ("I64",) if name in self._id_tables else _FLOATS
            if view.get_dtype() not in dtypes:
                raise ModelLoadError(
                    f"{path}: tensor {name!r} has dtype {view.get_dtype()}; supported are {', '.join(dtypes)}"
                )
            self.shapes[name] = tuple(view.get_shape())
            self._shard_of[name] = file

    def _check_index(self, folder: Path) -> None:
        if not (folder / INDEX).exists() or (folder / SINGLE).exists():
            return
        listed = read_json(folder / INDEX)["weight_map"]
        lost = [name for name in listed if name not in self.shapes and not name.endswith(_IGNORED_SUFFIXES)]
        if lost:
            raise ModelLoadError(f"{folder / INDEX} lists {len(lost)} tensors that no shard holds, first {lost[0]!r}")


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"{path} is truncated or damaged ({error}); fetch it again, its size now is {path.stat().st_size} bytes"
        ) from None


def _shards(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder; a model is a Hugging Face folder or a .gguf file")
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        raise _nothing_to_load(folder)
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{folder / INDEX} has no weight_map; fetch the model again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelLoadError(f"{folder / INDEX} names {name!r}, which is not a safetensors file beside it")
        if not (folder / name).exists():
            raise ModelLoadError(f"{folder / name} is missing ({len(names)} shards are listed); fetch the model again")
    return [folder / name for name in names]


def _nothing_to_load(folder: Path) -> ModelLoadError:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        return ModelLoadError(
            f"{folder} has pickled weights only, which are never loaded; convert them to safetensors "
            "(transformers: model.save_pretrained)"
        )
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return ModelLoadError(f"{folder} has no {SINGLE}; to load its GGUF file, name the file: {ggufs[0]}")
    return ModelLoadError(f"{folder} has neither {SINGLE} nor {INDEX}; a model folder needs one of them")
