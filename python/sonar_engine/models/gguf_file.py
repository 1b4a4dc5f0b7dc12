"""One GGUF file: metadata and the table of tensors, bounds-checked, with the data mapped and not yet read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). The `gguf`
package supplies type numbers, block sizes and most of the dequantisation; its reader needs seconds for a vocabulary
of 50,000 strings, this one about 0.1 s.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from sonar_engine.errors import ModelLoadError
from sonar_engine.models.block_quants import QUICK

MAGIC = b"GGUF"
# GGUF value type -> struct format; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MAX_ELEMENTS = 1 << 40
# fp32 values dequantised at a time: they stay in the cache, and torch copies fewer than 32,768 elements on the calling
# thread (waking its pool for each of thousands of blocks costs more than the whole work).
CHUNK_ELEMENTS = 30_000


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies: `shape` outermost first (torch's order), `offset` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    quantisation: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF file. Use as a context manager; the mapping ends with it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        reader = _Reader(self._map, self.path)
        try:
            num_tensors, num_entries = reader.header()
            self.metadata: dict[str, Any] = dict(reader.entry() for _ in range(num_entries))
            self.tensors = {t.name: t for t in reader.tensor_table(num_tensors, self._alignment())}
        except BaseException:
            self._map.close()
            raise
        if len(self.tensors) != num_tensors:
            self._map.close()
            raise ModelLoadError(f"{self.path}: two tensors share one name")

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._map.close()

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelLoadError(f"{self.path}: general.alignment must be a power of two, not {alignment!r}")
        return alignment

    def rows(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Dequantised fp32 rows of a tensor, some at a time: (first row, [rows, last dimension])."""
        tensor = self.tensors[name]
        num_columns = tensor.shape[-1]
        num_rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        row_bytes = tensor.num_bytes // num_rows
        step = max(1, CHUNK_ELEMENTS // num_columns)
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            start = tensor.offset + first * row_bytes
            raw = np.frombuffer(self._map[start : start + count * row_bytes], dtype=np.uint8)
            yield first, self._dequantised(raw.reshape(count, row_bytes), tensor)

    def _dequantised(self, raw: np.ndarray, tensor: GgufTensor) -> np.ndarray:
        try:
            with np.errstate(all="ignore"):  # a scale may be infinite in a damaged file
                return (QUICK.get(tensor.quantisation) or partial(dequantize, qtype=tensor.quantisation))(raw)
        except NotImplementedError:
            raise ModelLoadError(
                f"{self.path}: tensor {tensor.name!r} is of type {tensor.quantisation.name}, which is not supported"
            ) from None


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist") from None
    except ValueError:
        raise ModelLoadError(f"{path} is empty; a GGUF file begins with the bytes 'GGUF'") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None


class _Reader:
    """A cursor over the mapped file; every read is checked against the file's end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.size, self.at = data, path, len(data), 0

    def truncated(self) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path} is truncated or damaged: it ends at byte {self.size}, inside what its header announces; "
            "fetch it again"
        )

    def unpack(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        if self.at + size > self.size:
            raise self.truncated()
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def header(self) -> tuple[int, int]:
        """(number of tensors, number of metadata entries)."""
        if self.data[:4] != MAGIC:
            raise ModelLoadError(f"{self.path} is not a GGUF file: it begins with {bytes(self.data[:4])!r}")
        self.at = 4
        version = self.unpack("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path}: GGUF version {version} is not supported; versions 2 and 3 are")
        num_tensors, num_entries = self.unpack("Q"), self.unpack("Q")
        if (num_tensors + num_entries) * 12 > self.size:
            raise self.truncated()
        return num_tensors, num_entries

    def string(self) -> str:
        length = self.unpack("Q")
        if length > self.size - self.at:
            raise self.truncated()
        text = self.data[self.at : self.at + length].decode("utf-8", errors="replace")
        self.at += length
        return text

    def entry(self) -> tuple[str, Any]:
        key = self.string()
        return key, self.value(self.unpack("I"))

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self.path} is damaged: value type {kind} does not exist in GGUF")
        return self.unpack(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.unpack("I"), self.unpack("Q")
        if kind == _STRING:
            return self.strings(count)
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self.path} is damaged: array of value type {kind}")
        if count > self.size - self.at:
            raise self.truncated()
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        if layout.size > self.size - self.at:
            raise self.truncated()
        values = list(layout.unpack_from(self.data, self.at))
        self.at += layout.size
        return values

    def strings(self, count: int) -> list[str]:
        """`count` strings: a vocabulary has 50,000 and more, so this loop is tight."""
        if count * 8 > self.size - self.at:
            raise self.truncated()
        data, at, size, length_at = self.data, self.at, self.size, _LENGTH.unpack_from
        texts = []
        for _ in range(count):
            if at + 8 > size:
                raise self.truncated()
            start = at + 8
            at = start + length_at(data, at)[0]
            if at > size:
                raise self.truncated()
            texts.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return texts

    def tensor_table(self, count: int, alignment: int) -> list[GgufTensor]:
        """The table; offsets in the file count from the aligned end of the table."""
        entries = [self._table_entry() for _ in range(count)]
        start = (self.at + alignment - 1) // alignment * alignment
        tensors = [
            GgufTensor(name, shape, kind, start + offset, num_bytes) for name, shape, kind, offset, num_bytes in entries
        ]
        self._check_layout(tensors, alignment)
        for tensor in tensors:
            if tensor.offset + tensor.num_bytes > self.size:
                raise ModelLoadError(
                    f"{self.path} is truncated: tensor {tensor.name!r} ends at byte "
                    f"{tensor.offset + tensor.num_bytes}, the file at {self.size}; fetch it again"
                )
        return tensors

    def _check_layout(self, tensors: list[GgufTensor], alignment: int) -> None:
        """Each tensor begins at a multiple of the alignment, and behind the end of the one before it."""
        end = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.offset % alignment:
                raise ModelLoadError(
                    f"{self.path} is damaged: tensor {tensor.name!r} begins at byte {tensor.offset}, "
                    f"which is no multiple of {alignment}; fetch it again"
                )
            if tensor.offset < end:
                raise ModelLoadError(
                    f"{self.path} is damaged: tensor {tensor.name!r} overlaps the one before it; fetch it again"
                )
            end = tensor.offset + tensor.num_bytes

    def _table_entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
        name = self.string()
        num_dimensions = self.unpack("I")
        if not 1 <= num_dimensions <= 4:
            raise ModelLoadError(f"{self.path}: tensor {name!r} has {num_dimensions} dimensions; 1 to 4 are possible")
        sizes = [self.unpack("Q") for _ in range(num_dimensions)]  # innermost first
        kind, offset = self.unpack("I"), self.unpack("Q")
        num_elements = 1
        for size in sizes:
            num_elements *= size
        if not 0 < num_elements <= _MAX_ELEMENTS:
            raise ModelLoadError(f"{self.path}: tensor {name!r} has the impossible shape {sizes[::-1]}")
        if kind not in set(GGMLQuantizationType):
            raise ModelLoadError(f"{self.path}: tensor {name!r} has the unknown type {kind}")
        quantisation = GGMLQuantizationType(kind)
        block_elements, block_bytes = GGML_QUANT_SIZES[quantisation]
        if sizes[0] % block_elements:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} of {quantisation.name} has rows of {sizes[0]} elements; "
                f"they must be a multiple of {block_elements}"
            )
        return name, tuple(sizes[::-1]), quantisation, offset, num_elements // block_elements * block_bytes
