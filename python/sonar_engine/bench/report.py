"""What a measurement is: how it is run, and its figures in the order in which they are printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Measurement = dict[str, str | int | float | None]
Opponent = Literal["transformers"]


@dataclass(frozen=True)
class Settings:
    """How a benchmark of the whole engine is run."""

    output_len: int
    repeat: int
    opponent: Opponent | None = None
    rss: bool = False
