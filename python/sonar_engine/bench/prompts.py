"""The 60 prompts that the benchmarks and the documentation measure with."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

Prompt = str | list[dict[str, Any]]


def load_prompts() -> list[Prompt]:
    """Texts to continue and conversations, in the order of the file."""
    lines = (files("sonar_engine.bench") / "prompts.jsonl").read_text(encoding="utf-8").strip().split("\n")
    return [entry.get("prompt") or entry["messages"] for entry in map(json.loads, lines)]
