"""The README of an exported head or draft model: what it is, its data, its settings, and its licence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonar_engine.files import read_json_file, replacing
from sonar_engine.models.registry import KNOWN_MODELS
from sonar_engine.training.identity import TargetIdentity
from sonar_engine.training.texts import SELF

_COMMON = """
## Data

{data}
No other text is in the training data than the target's answers and the prompts that it was given.

## Settings

{settings}

## Licence

{licence} The weights derive from the target and from texts that it wrote, so the target's licence holds for them too.
"""


def write_note(folder: Path, opening: str, target: TargetIdentity, facts: Mapping[str, Any]) -> None:
    """`facts`: num_texts, num_tokens, steps, sources (the prompts' file -> texts), settings (name -> value) and earlier
    (facts of runs before, in order)."""
    runs = [*facts["earlier"], facts]
    common = _COMMON.format(
        data="\n".join(map(_data_line, runs)),
        settings=", ".join(f"`{name}` {_shown(value)}" for name, value in sorted(facts["settings"].items())) + ".",
        licence=_licence(target),
    )
    with replacing(folder / "README.md") as part:
        part.write_text(opening + common, encoding="utf-8")


def earlier_runs(begun_from: Path | None, made_by: str) -> list[dict[str, Any]]:
    """The facts of the runs behind the head or draft in `begun_from`, in order, without their settings."""
    if begun_from is None:
        return []
    last = read_json_file(begun_from / "config.json", made_by).get("training")
    if not isinstance(last, dict):
        return []
    own = {name: last[name] for name in ("num_texts", "num_tokens", "steps", "sources") if name in last}
    return [*last.get("earlier", []), own]


def _data_line(run: Mapping[str, Any]) -> str:
    made = f"- {run['steps']:,} steps on {run['num_texts']:,} texts ({run['num_tokens']:,} tokens) of the target."
    sources = ", ".join(
        f"{num:,} {'of its own' if name == SELF else f'from `{name}`'}" for name, num in run.get("sources", {}).items()
    )
    return f"{made} Prompts, with those of the validation: {sources}." if sources else made


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _licence(target: TargetIdentity) -> str:
    known = next((model for model in KNOWN_MODELS.values() if model.file_sha256 == target.sha256), None)
    return "That of the target." if known is None else f"{known.licence}, as {target.name}."
