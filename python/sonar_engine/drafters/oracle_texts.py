"""The file that the oracle drafter replays: lines of `sonar generate --json`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from sonar_engine.errors import ConfigError

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Line(msgspec.Struct):
    prompt_token_ids: list[_TokenId]
    token_ids: list[_TokenId]


def read_oracle_texts(file: str | None, vocab_size: int) -> dict[bytes, np.ndarray]:
    """Output token ids int32 [N] by prompt, the bytes of its int32 ids; a later line for a prompt wins.

    Raises ConfigError with the line that does not fit.
    """
    if file is None:
        raise ConfigError("speculative method 'oracle' needs oracle_texts: a file of `sonar generate --json` lines")
    try:
        lines = Path(file).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"oracle_texts {file}: {error.strerror}; write it with `sonar generate --json`") from error
    texts = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompt, output = _read_line(line, f"oracle_texts {file}, line {number}", vocab_size)
            texts[prompt.tobytes()] = output
    return texts


def _read_line(line: bytes, place: str, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        fields = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{place}: {error}; write it with `sonar generate --json`") from error
    most = max([*fields.prompt_token_ids, *fields.token_ids], default=0)
    if most >= vocab_size:
        raise ConfigError(f"{place}: token id {most} is out of range; ids are 0 to {vocab_size - 1}")
    return np.array(fields.prompt_token_ids, np.int32), np.array(fields.token_ids, np.int32)
