"""`sonar train data`: the target answers prompts, those of files and its own, until there are enough tokens.

Every text is a function of the settings and its index alone, and texts are written in the order of their indices: so a
run that was killed and started again ends with the same file as one that was not.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sonar_engine.drafters.capture import capturing
from sonar_engine.engine import Engine, Progress, build_engine
from sonar_engine.errors import TrainingError
from sonar_engine.files import check_room, read_json_file, write_json
from sonar_engine.models.registry import resolve_model
from sonar_engine.tokenizer import Tokenizer
from sonar_engine.training.capture import (
    ShardFiller,
    StateCollector,
    begin_index,
    bytes_per_token,
    capture_states,
)
from sonar_engine.training.config import DataConfig
from sonar_engine.training.identity import TargetIdentity
from sonar_engine.training.journal import Journal
from sonar_engine.training.prompts import ChatPrompt, UserTurn, plain_key, read_prompt_files
from sonar_engine.training.streamed import Request, Task, TaskRunner
from sonar_engine.training.texts import COMMAND, MANIFEST, SELF, TEXTS, Text, read_texts
from sonar_engine.types import SamplingParams

_WINDOW = 4  # tasks under way for each sequence of a batch: enough that a long answer does not starve it
# Settings that may change between two runs over one folder.
_FREE = {"out", "states", "shard_tokens", "tokens", "max_num_seqs", "max_num_batched_tokens", "num_threads", "model"}


@dataclass(frozen=True)
class _Item:
    """One text to be made. `prompt` is None where the target writes it."""

    index: int
    prompt: ChatPrompt | None
    temperature: float


@dataclass(frozen=True)
class _Made:
    """A text, and its states [T, H] where they are wanted."""

    text: Text
    states: torch.Tensor | None


@dataclass(frozen=True)
class _Seen:
    """What has been written, to leave out what comes twice."""

    prompts: set[bytes] = field(default_factory=set)
    texts: set[bytes] = field(default_factory=set)

    def add(self, text: Text, turn: UserTurn, tokenizer: Tokenizer) -> bool:
        """Whether neither the text nor, where the target wrote it, the prompt was there before."""
        whole = _digest(text.tokens.tobytes())
        if whole in self.texts:
            return False
        if text.source == SELF:
            own = tokenizer.decode(text.tokens[len(turn.prefix) : text.prompt_len].tolist())
            key = _digest(plain_key(own).encode())
            if key in self.prompts:
                return False
            self.prompts.add(key)
        self.texts.add(whole)
        return True


def make_texts(config: DataConfig, progress: Progress) -> dict[str, Any]:
    """Fills `config.out` and returns its manifest. Raises TrainingError, ConfigError or ModelLoadError."""
    prompts = read_prompt_files(config.prompts)
    collector = None if config.states is None else StateCollector()
    engine_config = config.engine_config(**_lengths(config), enable_prefix_caching=collector is None)
    engine = build_engine(engine_config, progress, None if collector is None else capturing(collector.add))
    try:
        return _Maker(config, engine, prompts, collector).run(progress)
    finally:
        engine.close()


def _lengths(config: DataConfig) -> dict[str, Any]:
    from sonar_engine.models.model_config import ModelConfig

    limit = ModelConfig.load(resolve_model(config.model).path).max_position_embeddings
    return {"max_model_len": min(limit, config.max_prompt_tokens + config.max_answer_tokens)}


class _Maker:
    def __init__(
        self, config: DataConfig, engine: Engine, prompts: list[ChatPrompt], collector: StateCollector | None
    ) -> None:
        """`collector` takes what the engine captures; None: states are not wanted."""
        self._config = config
        self._engine = engine
        self._collector = collector
        self._turn = UserTurn.of(engine.tokenizer)
        self._prompts = _shuffled(_distinct(prompts), config.seed)
        self._identity = TargetIdentity.of(resolve_model(config.model), engine.tokenizer)

    def run(self, progress: Progress) -> dict[str, Any]:
        config, out = self._config, self._config.out
        self._begin()
        seen, num_tokens, first = self._continue()
        filler = self._filler(config.tokens - num_tokens, progress)
        runner = TaskRunner(self._engine, _WINDOW * config.max_num_seqs)
        results = runner.run(self._task(item) for item in self._items(first))
        with Journal(out / TEXTS) as journal, closing(results):
            while num_tokens < config.tokens:
                progress("Answering", num_tokens, config.tokens)
                made = next(results, _NO_MORE)
                if made is _NO_MORE:
                    break
                if isinstance(made, _Made) and seen.add(made.text, self._turn, self._engine.tokenizer):
                    journal.append(made.text.to_record())
                    num_tokens += made.text.num_answer_tokens
                    if filler is not None and made.states is not None:
                        filler.add(made.text, made.states)
        progress("Answering", min(num_tokens, config.tokens), config.tokens)
        if filler is not None:
            filler.close()
        manifest = self._manifest(_counts(out))
        write_json(out / MANIFEST, manifest)
        return manifest

    def _filler(self, answer_tokens: int, progress: Progress) -> ShardFiller | None:
        """For the states of what is to come, after those that a killed run has left out."""
        config, dtype = self._config, self._engine.info.dtype
        if config.states is None or self._collector is None:
            return None
        check_room(config.states, max(answer_tokens, 0) * bytes_per_token(self._identity, dtype), "the states")
        texts = list(read_texts(config.out))
        index = begin_index(config.states, self._identity, dtype, texts)
        filler, rest = ShardFiller(config.states, index, config.shard_tokens), texts[index.num_texts :]
        states = capture_states(self._engine, self._collector, iter(rest))
        for done, (text, state) in enumerate(zip(rest, states, strict=True), start=1):
            filler.add(text, state)
            progress("Capturing", done, len(rest))
        return filler

    def _begin(self) -> None:
        """Raises TrainingError where the folder holds texts made with other settings."""
        path = self._config.out / MANIFEST
        if not path.exists():
            write_json(path, self._manifest({}))
            return
        found = read_json_file(path, COMMAND)
        self._identity.check(TargetIdentity.from_dict(found.get("target"), str(path)), str(path))
        settings, before = self._settings(), found.get("settings", {})
        differing = [name for name in settings if settings[name] != before.get(name)]
        if differing:
            name = differing[0]
            raise TrainingError(
                f"{self._config.out} was begun with {name}={before.get(name)!r}, not {settings[name]!r}; "
                "give the same settings, or another folder"
            )

    def _continue(self) -> tuple[_Seen, int, int]:
        """What is there: texts, answer tokens, and the index to go on from."""
        seen, num_tokens, first = _Seen(), 0, 0
        for text in read_texts(self._config.out):
            seen.add(text, self._turn, self._engine.tokenizer)
            num_tokens += text.num_answer_tokens
            first = text.index + 1
        return seen, num_tokens, first

    def _items(self, first: int) -> Iterator[_Item]:
        """In order, from index `first`; the prompts of the files are spread evenly among those of the target."""
        config = self._config
        from_files = iter(self._prompts * config.rounds)
        for index in count():
            is_own = int((index + 1) * config.self_share) > int(index * config.self_share)
            prompt = None if is_own else next(from_files, None)
            if prompt is None and config.self_share == 0:
                return
            if index >= first:
                turn = _seed(config.seed, index, "temperature") % len(config.temperature)
                yield _Item(index, prompt, config.temperature[turn])

    def _task(self, item: _Item) -> Task[_Made | None]:
        """None: there is no prompt, or one that is too long."""
        config, tokenizer = self._config, self._engine.tokenizer
        if item.prompt is None:
            own = yield Request(self._turn.prefix, self._prompt_params(item))
            if self._collector is not None:
                self._collector.drop(own.request_id)
            stopped = own.finish_reason == "stop"
            ended = own.token_ids[-1:] and own.token_ids[-1] in self._turn.stop_ids
            words = tokenizer.decode(own.token_ids[:-1] if ended else own.token_ids).strip()
            if not stopped or not words:
                return None
            messages: tuple[Any, ...] = ({"role": "user", "content": words},)
        else:
            messages = item.prompt.messages
        prompt = tokenizer.apply_chat_template(messages)
        if len(prompt) > config.max_prompt_tokens:
            return None
        answer = yield Request(prompt, self._answer_params(item))
        source = SELF if item.prompt is None else item.prompt.source
        tokens = np.array(prompt + answer.token_ids, np.int32)
        text = Text(item.index, source, item.temperature, tokens, len(prompt))
        states = None if self._collector is None else self._collector.take(answer.request_id, len(tokens))
        return _Made(text, states)

    def _prompt_params(self, item: _Item) -> SamplingParams:
        return SamplingParams(
            temperature=self._config.prompt_temperature,
            seed=_seed(self._config.seed, item.index, "prompt"),
            max_tokens=self._config.max_prompt_tokens - len(self._turn.prefix),
            stop_token_ids=self._turn.stop_ids,
        )

    def _answer_params(self, item: _Item) -> SamplingParams:
        return SamplingParams(
            temperature=item.temperature,
            seed=_seed(self._config.seed, item.index, "answer"),
            max_tokens=self._config.max_answer_tokens,
        )

    def _settings(self) -> dict[str, Any]:
        """What the texts are a function of, beside the target. Prompts count by what they say."""
        settings = self._config.model_dump(mode="json", exclude=_FREE | {"prompts"})
        listing = "\n".join(str(prompt.messages) for prompt in self._prompts)
        return settings | {"prompts": [path.name for path in self._config.prompts], "prompts_sha256": _hex(listing)}

    def _manifest(self, counts: dict[str, Any]) -> dict[str, Any]:
        return {"target": self._identity.to_dict(), "settings": self._settings(), "counts": counts}


_NO_MORE = object()


def _counts(out: Path) -> dict[str, Any]:
    """From the texts themselves, so that a run in pieces gives the same."""
    sources: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    last = -1
    for text in read_texts(out):
        sources[text.source_file] += 1
        totals.update(texts=1, prompt_tokens=text.prompt_len, answer_tokens=text.num_answer_tokens)
        last = text.index
    return {**totals, "left_out": last + 1 - totals["texts"], "texts_by_source": dict(sorted(sources.items()))}


def _distinct(prompts: list[ChatPrompt]) -> list[ChatPrompt]:
    return list({plain_key(str(prompt.messages)): prompt for prompt in reversed(prompts)}.values())[::-1]


def _shuffled(prompts: list[ChatPrompt], seed: int) -> list[ChatPrompt]:
    order = np.random.default_rng(seed).permutation(len(prompts))
    return [prompts[index] for index in order]


def _seed(*parts: Any) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
