"""Resident memory of this process, and how much of it is neither weights nor KV cache."""

from __future__ import annotations

from pathlib import Path

from sonar_engine.bench.report import Measurement
from sonar_engine.engine import Engine
from sonar_engine.errors import ConfigError

MEGABYTE = 1e6


def memory_figures(engine: Engine) -> Measurement:
    """Megabytes (10^6 bytes): resident now, at its highest, weights, KV cache, and the rest of the resident set."""
    status = _process_status()
    resident, highest = status["VmRSS"], status["VmHWM"]
    weights, kv_cache = engine.weight_bytes / MEGABYTE, engine.kv_cache_bytes / MEGABYTE
    return {
        "rss_mb": resident,
        "peak_rss_mb": highest,
        "weights_mb": weights,
        "kv_cache_mb": kv_cache,
        "other_mb": resident - weights - kv_cache,
    }


def _process_status() -> dict[str, float]:
    """Megabytes by name from the kernel's account of this process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError as error:
        raise ConfigError("--rss reads /proc/self/status, which this system lacks; leave --rss out") from error
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 / MEGABYTE for name in ("VmRSS", "VmHWM")}
