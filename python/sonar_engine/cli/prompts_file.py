"""Prompts from a JSON Lines file: `{"prompt": text}` or `{"messages": [...]}` a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sonar_engine.errors import InvalidRequestError, reason

Prompt = str | list[dict[str, Any]]

EXPECTED = 'right: {"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}'


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of `path` in order; empty lines are skipped.

    Raises InvalidRequestError naming the line that is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a raw U+2028 is text
    except OSError as error:
        raise InvalidRequestError(f"--prompts {path}: {error.strerror}; give a readable JSON Lines file") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"--prompts {path}: not UTF-8 text; give a JSON Lines file") from error
    prompts = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidRequestError(f"--prompts {path}: no prompts in it; {EXPECTED}")
    return prompts


def _parse(line: str, place: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers of too many digits, and too deep nesting
        raise InvalidRequestError(f"{place}: not JSON ({reason(error)}); {EXPECTED}") from error
    if not isinstance(entry, dict) or set(entry) not in ({"prompt"}, {"messages"}):
        raise InvalidRequestError(f"{place}: must have exactly one of the keys prompt and messages; {EXPECTED}")
    if isinstance(entry.get("prompt"), str):
        return str(entry["prompt"])
    messages = entry.get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise InvalidRequestError(
            f"{place}: prompt must be a text, messages a list of objects with a role and a content of text; {EXPECTED}"
        )
    return messages


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(field), str) for field in ("role", "content"))
