"""Captured states on disk: safetensors files of whole texts, and an index with their checksums.

A file holds `hidden` [N, H] (the target's final hidden states, post-norm, as it computed them), `tokens` int32 [N],
`text_indptr` int64 [D + 1] (its texts' half-open ranges) and `prompt_lens` int32 [D]. A file is in the index or does
not count, so a run that was killed goes on behind the last one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sonar_engine.errors import TrainingError, reason
from sonar_engine.files import read_json_file, replacing, sha256_of_bytes, write_json
from sonar_engine.models.registry import sha256_of
from sonar_engine.training.identity import TargetIdentity
from sonar_engine.training.texts import Text

INDEX = "index.json"
COMMAND = "sonar train capture"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Shard:
    """One file of the index."""

    file: str
    sha256: str
    num_texts: int
    num_tokens: int
    texts_by_source: dict[str, int] = field(default_factory=dict)  # by the file of the prompt


@dataclass(frozen=True)
class ShardIndex:
    """`dtype` is the name of the states' dtype; `texts_sha256` is of the texts that have been captured."""

    target: TargetIdentity
    dtype: str
    texts_sha256: str
    shards: tuple[Shard, ...] = ()

    @property
    def num_texts(self) -> int:
        return sum(shard.num_texts for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    def write(self, folder: Path) -> None:
        write_json(
            folder / INDEX,
            {
                "target": self.target.to_dict(),
                "dtype": self.dtype,
                "texts_sha256": self.texts_sha256,
                "num_texts": self.num_texts,
                "num_tokens": self.num_tokens,
                "shards": [asdict(shard) for shard in self.shards],
            },
        )

    @classmethod
    def read(cls, folder: Path) -> ShardIndex:
        """Raises TrainingError for an index that is missing or damaged."""
        path = folder / INDEX
        raw = read_json_file(path, COMMAND)
        try:
            if raw["dtype"] not in _DTYPES:
                raise ValueError(f"dtype {raw['dtype']!r}")
            shards = tuple(Shard(**shard) for shard in raw["shards"])
            target = TargetIdentity.from_dict(raw["target"], str(path))
            return cls(target, raw["dtype"], raw["texts_sha256"], shards)
        except (KeyError, TypeError, ValueError) as error:
            raise TrainingError(f"{path} is damaged ({reason(error)}); make it again with `{COMMAND}`") from None


def texts_digest(texts: list[Text], before: str = "") -> str:
    """sha256 in hex over texts in order; `before` is the digest of those that came earlier."""
    digest = hashlib.sha256(before.encode())
    for text in texts:
        digest.update(f"{text.prompt_len} {len(text.tokens)} ".encode())
        digest.update(text.tokens.tobytes())
    return digest.hexdigest()


def write_shard(folder: Path, name: str, texts: list[Text], states: list[torch.Tensor]) -> Shard:
    """`states[i]` [len(texts[i].tokens), H]."""
    lengths = torch.tensor([0] + [len(text.tokens) for text in texts])
    tensors = {
        "hidden": torch.cat(states),
        "tokens": torch.cat([torch.from_numpy(text.tokens) for text in texts]),
        "text_indptr": lengths.cumsum(0),
        "prompt_lens": torch.tensor([text.prompt_len for text in texts], dtype=torch.int32),
    }
    with replacing(folder / name) as part:
        save_file(tensors, part)
        digest = sha256_of(part)
    sources = dict(sorted(Counter(text.source_file for text in texts).items()))
    return Shard(name, digest, len(texts), int(lengths.sum()), sources)


class CapturedTexts:
    """The texts of several capture folders with their states, read from disk as they are asked for."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        """Checks every checksum. Raises TrainingError for damaged files and for folders of different targets."""
        self._files: list[Any] = []
        self._place: list[tuple[int, int, int]] = []  # file, half-open range of rows, by text
        self.prompt_lens: list[int] = []
        sources: Counter[str] = Counter()
        indices = [ShardIndex.read(folder) for folder in folders]
        self.target, self.dtype = indices[0].target, _DTYPES[indices[0].dtype]
        self.digest = sha256_of_bytes(" ".join(index.texts_sha256 for index in indices).encode())
        for folder, index in zip(folders, indices, strict=True):
            self.target.check(index.target, str(folder))
            if index.dtype != indices[0].dtype:
                raise TrainingError(f"{folder} has {index.dtype} states, others {indices[0].dtype}; take one kind")
            for shard in index.shards:
                self._add(folder / shard.file, shard)
                sources.update(shard.texts_by_source)
        self.texts_by_source = dict(sorted(sources.items()))
        if not self._place:
            raise TrainingError(f"{folders[0]} holds no states yet; make them with `{COMMAND}`")

    def _add(self, path: Path, shard: Shard) -> None:
        try:
            if sha256_of(path) != shard.sha256:
                raise TrainingError(f"{path} is damaged: its checksum is not that of the index; capture it again")
            file = safe_open(path, "pt")
            indptr = file.get_tensor("text_indptr").tolist()
            self.prompt_lens += file.get_tensor("prompt_lens").tolist()
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"{path} cannot be read: {reason(error)}; capture it again") from None
        self._place += [(len(self._files), start, end) for start, end in pairwise(indptr)]
        self._files.append(file)

    def __len__(self) -> int:
        return len(self._place)

    def length(self, index: int) -> int:
        """Tokens of a text."""
        _, start, end = self._place[index]
        return end - start

    def tokens(self, index: int) -> torch.Tensor:
        """int32 [T]"""
        return self._read("tokens", index)

    def hidden(self, index: int) -> torch.Tensor:
        """[T, H]"""
        return self._read("hidden", index)

    def _read(self, name: str, index: int) -> torch.Tensor:
        file, start, end = self._place[index]
        rows: torch.Tensor = self._files[file].get_slice(name)[start:end]
        return rows
