"""Prompts for training and measuring: chats and questions from files, and the place where the target writes its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonar_engine.errors import TrainingError, reason
from sonar_engine.tokenizer import Tokenizer

_MARK = "PROMPT-4d1c7be2-HERE"
_EXPECTED = (
    'a row has "messages", or one text under "prompt", "question" or "instruction", or a list of texts under "turns"'
)


@dataclass(frozen=True)
class ChatPrompt:
    """One conversation that the target is to answer. `source` is file:line; `task` is the row's category."""

    source: str
    messages: tuple[Mapping[str, str], ...]
    task: str


def read_prompt_files(paths: tuple[Path, ...]) -> list[ChatPrompt]:
    """All prompts, in order. Chat .jsonl, one row a line; .txt, texts with empty lines between.

    Raises TrainingError that names the file and line.
    """
    prompts: list[ChatPrompt] = []
    for path in paths:
        found = _of_text(path) if path.suffix == ".txt" else _of_jsonl(path)
        if not found:
            raise TrainingError(f"{path}: no prompts in it; {_EXPECTED}")
        prompts += found
    return prompts


def _of_text(path: Path) -> list[ChatPrompt]:
    pieces = _read(path).replace("\r\n", "\n").split("\n\n")
    texts = [piece.strip() for piece in pieces if piece.strip()]
    return [ChatPrompt(f"{path.name}:{number}", _user(text), path.stem) for number, text in enumerate(texts, start=1)]


def _of_jsonl(path: Path) -> list[ChatPrompt]:
    prompts = []
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TrainingError(f"{place}: not JSON ({reason(error)}); {_EXPECTED}") from None
        if not isinstance(row, dict):
            raise TrainingError(f"{place}: must be an object; {_EXPECTED}")
        task = row.get("category")
        prompts.append(
            ChatPrompt(f"{path.name}:{number}", _messages(row, place), task if isinstance(task, str) else path.stem)
        )
    return prompts


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TrainingError(f"{path}: {error.strerror}; give a readable .jsonl or .txt file") from None
    except UnicodeDecodeError:
        raise TrainingError(f"{path}: not UTF-8 text; give a .jsonl or .txt file") from None


def _messages(row: dict[str, Any], place: str) -> tuple[Mapping[str, str], ...]:
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        kept = [{"role": message["role"], "content": message["content"]} for message in messages]
        while kept and kept[-1]["role"] == "assistant":
            kept.pop()  # the target gives its own answer
        if kept:
            return tuple(kept)
    turns = row.get("turns")
    texts = [row.get(key) for key in ("prompt", "question")] + [turns[0] if isinstance(turns, list) and turns else None]
    for text in [*texts, _instruction(row)]:
        if isinstance(text, str) and text.strip():
            return _user(text.strip())
    raise TrainingError(f"{place}: no prompt; {_EXPECTED}")


def _instruction(row: dict[str, Any]) -> str | None:
    """An instruction and, where there is one, the input of its first instance."""
    text = row.get("instruction")
    if not isinstance(text, str):
        return None
    instances = row.get("instances")
    first = instances[0] if isinstance(instances, list) and instances and isinstance(instances[0], dict) else row
    given = first.get("input")
    return f"{text}\n\n{given}" if isinstance(given, str) and given.strip() else text


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _user(text: str) -> tuple[Mapping[str, str], ...]:
    return ({"role": "user", "content": text},)


@dataclass(frozen=True)
class UserTurn:
    """The chat template up to where a first user message begins, and the ids that end one."""

    prefix: list[int]
    stop_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> UserTurn:
        """Raises TrainingError where the template does not show the place."""
        if not tokenizer.has_chat_template:
            raise TrainingError("the target has no chat template, so it cannot be asked; take a chat model")
        text = tokenizer.render_chat([{"role": "user", "content": _MARK}], add_generation_prompt=False)
        before, mark, after = text.partition(_MARK)
        prefix = tokenizer.encode(before, add_special_tokens=False)
        if not mark or not prefix:
            raise TrainingError("the chat template puts nothing before a user's message; set self_share to 0")
        ending = tokenizer.encode(after, add_special_tokens=False)
        stops = {*tokenizer.eos_token_ids, *[token for token in ending[:1] if token in tokenizer.special_ids]}
        return cls(prefix, sorted(stops))


def plain_key(text: str) -> str:
    """What two prompts have in common that differ in case and spacing only."""
    return " ".join(text.lower().split())
