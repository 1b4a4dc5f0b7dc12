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


def decoding_rate(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> float:
    """Tokens/s while all of `prompts` decode: from when each has a token until the first one ends, on an idle engine.

    So the batch has one size, as it has where requests wait; a whole run would end with ever fewer sequences.
    """
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, params)
    have_begun: set[int] = set()
    num_tokens, started, ended = 0, 0.0, False
    while not ended and (events := engine.step()) is not None:
        ended = bool(np.frombuffer(events.finish, np.int32).any())
        if len(have_begun) == len(prompts):
            num_tokens += int(np.frombuffer(events.num_tokens, np.int32).sum())
        else:
            have_begun.update(np.frombuffer(events.request_ids, np.int64).tolist())
            started = time.perf_counter()
    seconds = time.perf_counter() - started
    for i in range(len(prompts)):
        engine.abort(i)
    while engine.has_work():
        engine.step()
    if num_tokens == 0:
        raise ValueError("a sequence ended before the last one began; give longer outputs")
    return num_tokens / seconds


def interval(ratios: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % of the medians of resampled ratios."""
    random = np.random.default_rng(seed)
    medians = np.median(random.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)
