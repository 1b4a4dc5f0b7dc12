"""`sonar train capture`: the engine runs over the texts, as it serves them, and its final hidden states are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
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
from sonar_engine.training.shards import INDEX, Shard, ShardIndex, texts_digest, write_shard
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
        """[length, H]. Raises TrainingError where a position was never computed."""
        pieces = self._pieces.pop(request_id)
        whole = torch.full((length, pieces[0][1].shape[1]), torch.nan, dtype=pieces[0][1].dtype)
        for first, states in pieces:
            whole[first : first + len(states)] = states[: length - first]
        if whole[:, 0].isnan().any():
            raise TrainingError("the target's hidden states are incomplete or not numbers; check its weights")
        return whole


def capture_states(engine: Engine, collector: StateCollector, texts: Iterator[Text]) -> Iterator[torch.Tensor]:
    """The states [T, H] of each text, in order, from an engine that was built with `capturing(collector.add)`."""

    def task(text: Text) -> Task[torch.Tensor]:
        answer = yield Request(text.tokens.tolist(), _ONE_TOKEN)
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
    engine_config = config.engine_config(max_model_len=longest + 1, enable_prefix_caching=False)
    engine = build_engine(engine_config, progress, capturing(collector.add))
    try:
        index = _begin(config, target, engine.info.dtype, texts)
        rest = texts[index.num_texts :]
        num_tokens = sum(len(text.tokens) for text in rest)
        num_bytes = num_tokens * (target.hidden_size * _bytes_of(engine.info.dtype) + _EXTRA_BYTES_PER_TOKEN)
        say(f"{len(rest)} texts, {num_tokens:,} tokens, {num_bytes / 2**30:.2f} GiB in {config.out}")
        check_room(config.out, num_bytes, "the capture")
        states = capture_states(engine, collector, iter(rest))
        return _write_all(config, states, index, rest, progress)
    finally:
        engine.close()


def _bytes_of(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size


def _begin(config: CaptureConfig, target: TargetIdentity, dtype: str, texts: list[Text]) -> ShardIndex:
    """The index to go on from. Raises TrainingError where the folder holds states of other texts."""
    if not (config.out / INDEX).exists():
        index = ShardIndex(target, dtype, texts_digest([]))
        index.write(config.out)
        return index
    index = ShardIndex.read(config.out)
    target.check(index.target, str(config.out))
    digest, at = texts_digest([]), 0
    for shard in index.shards:
        digest, at = texts_digest(texts[at : at + shard.num_texts], digest), at + shard.num_texts
    if index.dtype != dtype or digest != index.texts_sha256 or at > len(texts):
        raise TrainingError(
            f"{config.out} holds {index.dtype} states of other texts than the {dtype} ones asked for; "
            "give the data folder it was begun with, or another folder"
        )
    return index


def _write_all(
    config: CaptureConfig, states: Iterator[torch.Tensor], index: ShardIndex, texts: list[Text], progress: Progress
) -> ShardIndex:
    """`states` of `texts`, in order."""
    total, done = sum(len(text.tokens) for text in texts), 0
    for group in _groups(texts, config.shard_tokens):
        captured = []
        for text, state in zip(group, islice(states, len(group)), strict=True):
            captured.append(state)
            done += len(text.tokens)
            progress("Capturing", done, total)
        shard = write_shard(config.out, _name(len(index.shards)), group, captured)
        index = _with(index, shard, group)
        index.write(config.out)
    _drop_strays(config.out, index)
    return index


def _groups(texts: list[Text], shard_tokens: int) -> Iterator[list[Text]]:
    """Texts in order, each group closed by the text that fills it."""
    group: list[Text] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text.tokens)
        if size >= shard_tokens:
            yield group
            group, size = [], 0
    if group:
        yield group


def _with(index: ShardIndex, shard: Shard, texts: list[Text]) -> ShardIndex:
    return replace(index, shards=(*index.shards, shard), texts_sha256=texts_digest(texts, index.texts_sha256))


def _name(number: int) -> str:
    return f"states-{number:05d}.safetensors"


def _drop_strays(folder: Path, index: ShardIndex) -> None:
    """What a killed run left unfinished."""
    known = {shard.file for shard in index.shards}
    for path in [*folder.glob("states-*.safetensors"), *folder.glob(".states-*.part")]:
        if path.name not in known:
            path.unlink()
