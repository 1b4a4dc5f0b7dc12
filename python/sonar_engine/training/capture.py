"""`sonar train capture`: the engine runs over the texts, as it serves them, and its final hidden states are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from sonar_engine.drafters.capture import capturing
from sonar_engine.engine import Engine, Progress, build_engine
from sonar_engine.errors import TrainingError
from sonar_engine.files import check_room, read_json_file
from sonar_engine.models.registry import resolve_model
from sonar_engine.tokenizer import load_tokenizer
from sonar_engine.training.config import CaptureConfig
from sonar_engine.training.identity import TargetIdentity
from sonar_engine.training.shards import INDEX, ShardIndex, texts_digest, write_shard
from sonar_engine.training.streamed import Request, Task, TaskRunner
from sonar_engine.training.texts import COMMAND, MANIFEST, Text, read_texts
from sonar_engine.types import SamplingParams

_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
_WINDOW = 4
_EXTRA_BYTES_PER_TOKEN = 8  # the token, and its share of ranges and names


class StateCollector:
    """Puts a request's states together from the steps that computed them."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def add(self, request_id: int, first: int, states: torch.Tensor) -> None:
        """The sink of `CaptureDrafter`."""
        self._pieces.setdefault(request_id, []).append((first, states))

    def take(self, request_id: int, length: int) -> torch.Tensor:
        """[length, H], of a text of `length` tokens. Nothing follows its last token, so that one has no state: zeros.

        Raises TrainingError where another position was never computed.
        """
        pieces = self._pieces.pop(request_id)
        whole = torch.full((length, pieces[0][1].shape[1]), torch.nan, dtype=pieces[0][1].dtype)
        for first, states in pieces:
            whole[first : first + len(states)] = states[: length - first]
        whole[-1] = 0
        if whole[:, 0].isnan().any():
            raise TrainingError("the target's hidden states are incomplete or not numbers; check its weights")
        return whole

    def drop(self, request_id: int) -> None:
        """They are not wanted."""
        self._pieces.pop(request_id, None)


def capture_states(engine: Engine, collector: StateCollector, texts: Iterator[Text]) -> Iterator[torch.Tensor]:
    """The states [T, H] of each text, in order, from an engine that was built with `capturing(collector.add)` and
    without prefix caching."""

    def task(text: Text) -> Task[torch.Tensor]:
        answer = yield Request(text.tokens[:-1].tolist(), _ONE_TOKEN)
        return collector.take(answer.request_id, len(text.tokens))

    runner = TaskRunner(engine, _WINDOW * engine.config.max_num_seqs)
    return runner.run(task(text) for text in texts)


def capture_texts(config: CaptureConfig, progress: Progress, say: Callable[[str], None]) -> ShardIndex:
    """Fills `config.out`; `say` is told the disk use beforehand. Raises TrainingError, ConfigError, ModelLoadError."""
    resolved = resolve_model(config.model)
    target = TargetIdentity.of(resolved, load_tokenizer(resolved))
    manifest = read_json_file(config.data / MANIFEST, COMMAND)
    target.check(TargetIdentity.from_dict(manifest.get("target"), str(config.data / MANIFEST)), str(config.data))
    collector = StateCollector()
    texts = list(read_texts(config.data))
    longest = max((len(text.tokens) for text in texts), default=0)
    if not texts:
        raise TrainingError(f"{config.data} holds no texts yet; make them with `{COMMAND}`")
    engine_config = config.engine_config(max_model_len=longest, enable_prefix_caching=False)
    engine = build_engine(engine_config, progress, capturing(collector.add))
    try:
        index = begin_index(config.out, target, engine.info.dtype, texts)
        rest = texts[index.num_texts :]
        num_tokens = sum(len(text.tokens) for text in rest)
        num_bytes = num_tokens * bytes_per_token(target, engine.info.dtype)
        say(f"{len(rest)} texts, {num_tokens:,} tokens, {num_bytes / 2**30:.2f} GiB in {config.out}")
        check_room(config.out, num_bytes, "the capture")
        states = capture_states(engine, collector, iter(rest))
        filler, done = ShardFiller(config.out, index, config.shard_tokens), 0
        for text, state in zip(rest, states, strict=True):
            filler.add(text, state)
            done += len(text.tokens)
            progress("Capturing", done, num_tokens)
        return filler.close()
    finally:
        engine.close()


def bytes_per_token(target: TargetIdentity, dtype: str) -> int:
    """On disk."""
    size: int = getattr(torch, dtype).itemsize
    return target.hidden_size * size + _EXTRA_BYTES_PER_TOKEN


def begin_index(folder: Path, target: TargetIdentity, dtype: str, texts: list[Text]) -> ShardIndex:
    """The index to go on from. Raises TrainingError where the folder holds states of other texts."""
    if not (folder / INDEX).exists():
        index = ShardIndex(target, dtype, texts_digest([]))
        index.write(folder)
        return index
    index = ShardIndex.read(folder)
    target.check(index.target, str(folder))
    digest, at = texts_digest([]), 0
    for shard in index.shards:
        digest, at = texts_digest(texts[at : at + shard.num_texts], digest), at + shard.num_texts
    if index.dtype != dtype or digest != index.texts_sha256 or at > len(texts):
        raise TrainingError(
            f"{folder} holds {index.dtype} states of other texts than the {dtype} ones asked for; "
            "give the data folder it was begun with, or another folder"
        )
    return index


class ShardFiller:
    """Writes texts and their states, in order, to files of about `shard_tokens` tokens behind those of `index`."""

    def __init__(self, folder: Path, index: ShardIndex, shard_tokens: int) -> None:
        self._folder = folder
        self._index = index
        self._shard_tokens = shard_tokens
        self._texts: list[Text] = []
        self._states: list[torch.Tensor] = []

    def add(self, text: Text, states: torch.Tensor) -> None:
        """states [T, H]. A file is closed by the text that fills it."""
        self._texts.append(text)
        self._states.append(states)
        if sum(len(each.tokens) for each in self._texts) >= self._shard_tokens:
            self._write()

    def close(self) -> ShardIndex:
        """Writes what is left, and removes what a killed run left unfinished."""
        if self._texts:
            self._write()
        known = {shard.file for shard in self._index.shards}
        for path in [*self._folder.glob("states-*.safetensors"), *self._folder.glob(".states-*.part")]:
            if path.name not in known:
                path.unlink()
        return self._index

    def _write(self) -> None:
        index = self._index
        name = f"states-{len(index.shards):05d}.safetensors"
        shard = write_shard(self._folder, name, self._texts, self._states)
        digest = texts_digest(self._texts, index.texts_sha256)
        self._index = replace(index, shards=(*index.shards, shard), texts_sha256=digest)
        self._index.write(self._folder)
        self._texts, self._states = [], []
