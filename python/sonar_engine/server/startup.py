"""What the server says when it starts, and while it is busy."""

from __future__ import annotations

import time
from typing import Any

from pydantic import BaseModel

from sonar_engine.config import EngineConfig
from sonar_engine.server.config import ServerConfig
from sonar_engine.types import EngineInfo, EngineStats

SECRETS = frozenset({"api_keys", "admin_key"})


def options_line(engine: EngineConfig, server: ServerConfig) -> str:
    """All options that differ from their defaults; keys are counted, not shown."""
    shown = [*_changed(engine), *_changed(server)]
    return "options: " + (", ".join(shown) if shown else "all default")


def _changed(config: BaseModel) -> list[str]:
    return [f"{name}={_shown(name, value)}" for name, value in config.model_dump(exclude_defaults=True).items()]


def _shown(name: str, value: Any) -> str:
    if name in SECRETS:
        return f"({len(value)} keys)" if isinstance(value, list | tuple) else "(1 key)"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {each}" for key, each in value.items()) + "}"
    return str(value)


def model_lines(info: EngineInfo) -> list[str]:
    """The loaded model: numbers, cache, drafter."""
    tokens = info.num_pages * info.page_size
    drafter = "no drafting"
    if info.num_speculative_tokens:
        drafter = f"drafter {info.drafter}, up to {info.num_speculative_tokens} draft tokens a step"
        drafter += ", LOSSY acceptance: above temperature 0 texts are not the target's own" if info.lossy else ""
    return [
        f"model {info.model_name}: {info.dtype} on {info.device}, context {info.max_model_len} tokens",
        f"KV cache: {info.num_pages} pages, {tokens} tokens: {tokens / info.max_model_len:.1f} sequences of "
        f"{info.max_model_len} tokens",
        drafter,
    ]


class StatsLine:
    """One log line for the time since the last, from the engine's counters."""

    def __init__(self) -> None:
        self._last: EngineStats | None = None
        self._at = time.monotonic()

    def next(self, stats: EngineStats) -> str | None:
        """None when nothing ran since the last call, or there was none."""
        last, self._last = self._last, stats
        now, at = time.monotonic(), self._at
        self._at = now
        if last is None:
            return None
        moved = stats.num_steps > last.num_steps and (
            stats.generation_tokens > last.generation_tokens or stats.prompt_tokens > last.prompt_tokens
        )
        if not moved and not stats.num_running and not stats.num_waiting:
            return None
        seconds = max(now - at, 1e-6)
        parts = [
            f"prompt {(stats.prompt_tokens - last.prompt_tokens) / seconds:.1f} tokens/s",
            f"generation {(stats.generation_tokens - last.generation_tokens) / seconds:.1f} tokens/s",
            f"running {stats.num_running}",
            f"waiting {stats.num_waiting}",
            f"KV {100 * stats.kv_cache_usage:.1f} %",
            f"prefix hits {_percent(stats.prefix_hits - last.prefix_hits, stats.prefix_queries - last.prefix_queries)}",
        ]
        return ", ".join(parts + _acceptance(last, stats, seconds))


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _acceptance(last: EngineStats, stats: EngineStats, seconds: float) -> list[str]:
    """Of the time between two statistics; empty when nothing was drafted."""
    drafts = stats.num_drafts - last.num_drafts
    if drafts <= 0:
        return []
    accepted = stats.num_accepted_tokens - last.num_accepted_tokens
    drafted = stats.num_draft_tokens - last.num_draft_tokens
    before = last.accepted_per_pos + [0] * (len(stats.accepted_per_pos) - len(last.accepted_per_pos))
    positions = [(now - then) / drafts for now, then in zip(stats.accepted_per_pos, before, strict=False)]
    return [
        f"acceptance length {1 + accepted / drafts:.2f}",
        f"accepted {accepted / seconds:.1f} tokens/s",
        f"drafted {drafted / seconds:.1f} tokens/s",
        "per position " + " ".join(f"{share:.2f}" for share in positions),
    ]
