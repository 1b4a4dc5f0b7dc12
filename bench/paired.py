"""What measurements in turn share: the load of one run, the oracle's texts, an interval around a median of ratios."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sonar_engine.engine import Engine
from sonar_engine.types import SamplingParams

Params = SamplingParams | Sequence[SamplingParams]


def write_texts(engine: Engine, prompts: list[list[int]], params: Params, file: Path) -> None:
    """What the oracle replays: the load's own outputs."""
    completions = engine.generate(prompts, params)
    lines = [
        json.dumps({"prompt_token_ids": prompt, "token_ids": completion.token_ids})
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    file.write_text("\n".join(lines))


def tokens_per_second(engine: Engine, prompts: list[list[int]], params: Params) -> float:
    """Of a whole run: prompts that find no place enter when a sequence ends, beside those that decode."""
    started = time.perf_counter()
    completions = engine.generate(prompts, params)
    return sum(len(completion.token_ids) for completion in completions) / (time.perf_counter() - started)


def interval(ratios: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % of the medians of resampled ratios."""
    random = np.random.default_rng(seed)
    medians = np.median(random.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)
