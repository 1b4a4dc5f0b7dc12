"""The texts that a head is trained on: a prompt and the target's answer to it, as token ids, in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sonar_engine.errors import TrainingError
from sonar_engine.training.journal import read_journal

TEXTS = "texts.jsonl"
MANIFEST = "manifest.json"
COMMAND = "sonar train data"
SELF = "self"  # the source of prompts that the target wrote


@dataclass(frozen=True)
class Text:
    """`tokens` int32 [T]: the chat prompt, `prompt_len` tokens, then the answer. `index` grows within a folder."""

    index: int
    source: str
    temperature: float
    tokens: np.ndarray
    prompt_len: int

    @property
    def num_answer_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def source_file(self) -> str:
        """Name of the prompt's file, or `SELF`."""
        return self.source.partition(":")[0]

    def to_record(self) -> dict[str, Any]:
        tokens = self.tokens.tolist()
        return {
            "index": self.index,
            "source": self.source,
            "temperature": self.temperature,
            "prompt": tokens[: self.prompt_len],
            "answer": tokens[self.prompt_len :],
        }

    @classmethod
    def from_record(cls, record: Any, where: str) -> Text:
        """Raises TrainingError for a line that another program wrote."""
        try:
            prompt, answer = record["prompt"], record["answer"]
            tokens = np.array(prompt + answer, dtype=np.int32)
            return cls(record["index"], record["source"], record["temperature"], tokens, len(prompt))
        except (TypeError, KeyError, ValueError, OverflowError):
            raise TrainingError(
                f"{where}: must have index, source, temperature, prompt and answer; make it with `{COMMAND}`"
            ) from None


def read_texts(folder: Path) -> Iterator[Text]:
    """The texts of a folder, in order."""
    path = folder / TEXTS
    for number, record in enumerate(read_journal(path), start=1):
        yield Text.from_record(record, f"{path}:{number}")
