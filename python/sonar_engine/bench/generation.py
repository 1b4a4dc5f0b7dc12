"""Whole-engine measurements: one greedy stream, or many side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sonar_engine.bench.compare import TransformersModel
from sonar_engine.bench.memory import memory_figures
from sonar_engine.bench.prompts import load_prompts
from sonar_engine.bench.report import Measurement, Settings
from sonar_engine.engine import Engine
from sonar_engine.types import SamplingParams

LATENCY_PROMPT_LEN = 46


@dataclass(frozen=True)
class Run:
    """One wave of requests."""

    total: float  # seconds from submission to the last token of all
    first_token: float  # seconds until the first request had its first token
    decode_rate: float  # tokens/s after the first token, summed over the streams


def measure_latency(engine: Engine, settings: Settings) -> Iterator[Measurement]:
    """One stream: the prompt of the set that is nearest to 46 tokens."""
    prompt = min(encoded_prompts(engine), key=lambda ids: abs(len(ids) - LATENCY_PROMPT_LEN))
    return _measure(engine, settings, [[prompt]])


def measure_throughput(engine: Engine, counts: list[int], settings: Settings) -> Iterator[Measurement]:
    """Waves of `counts` streams, each stream with a prompt of its own."""
    prompts = encoded_prompts(engine)
    waves = [[_turned(prompts[i % len(prompts)], i // len(prompts)) for i in range(count)] for count in counts]
    return _measure(engine, settings, waves)


def encoded_prompts(engine: Engine) -> list[list[int]]:
    """The prompts of the set as token ids; conversations through the chat template where the model has one."""
    tokenizer = engine.tokenizer
    return [
        tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt)
        for prompt in load_prompts()
    ]


def _turned(ids: list[int], by: int) -> list[int]:
    """The same ids from another start, so that a prompt used again shares no prefix with its first use."""
    by %= len(ids)
    return ids[by:] + ids[:by]


def _measure(engine: Engine, settings: Settings, waves: list[list[list[int]]]) -> Iterator[Measurement]:
    run_wave(engine, max(waves, key=len), settings.output_len)  # warm-up
    memory = memory_figures(engine) if settings.rss else {}
    other = None
    if settings.opponent is not None:
        other = TransformersModel(engine.config.model, getattr(torch, engine.info.dtype))
    for wave in waves:
        yield {**_describe(engine, wave, settings), **_compare(engine, wave, settings, other), **memory}


def _describe(engine: Engine, wave: list[list[int]], settings: Settings) -> Measurement:
    info = engine.info
    drafter = f"{info.drafter}-{info.num_speculative_tokens}" if info.num_speculative_tokens else info.drafter
    return {
        "model": info.model_name,
        "dtype": info.dtype,
        "drafter": drafter,
        "streams": len(wave),
        "prompt_tokens": sum(map(len, wave)),
        "output_len": settings.output_len,
    }


def _compare(engine: Engine, wave: list[list[int]], settings: Settings, other: TransformersModel | None) -> Measurement:
    """Medians over the repetitions; with an opponent the two run in turn."""
    ours, theirs = [], []
    if other is not None:
        other.generate(wave, 2)  # warm-up
    for _ in range(settings.repeat):
        ours.append(run_wave(engine, wave, settings.output_len))
        if other is not None:
            theirs.append(other.generate(wave, settings.output_len))
    num_tokens = len(wave) * settings.output_len
    rate = num_tokens / statistics.median(run.total for run in ours)
    figures: Measurement = {
        "tokens_per_second": rate,
        "decode_tokens_per_second": statistics.median(run.decode_rate for run in ours),
        "first_token_ms": statistics.median(run.first_token for run in ours) * 1000,
    }
    if theirs:
        other_rate = num_tokens / statistics.median(theirs)
        figures |= {"transformers_tokens_per_second": other_rate, "ratio": rate / other_rate}
    return figures


def run_wave(engine: Engine, wave: list[list[int]], output_len: int, speculate: bool = True) -> Run:
    """Runs all prompts of one wave at once, greedily and past EOS, from an empty prefix cache."""
    engine.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, speculative_enabled=speculate)
    started = time.perf_counter()
    completions = engine.generate(wave, params)
    ended = time.perf_counter()
    rates = [(output_len - 1) / completion.metrics.decode_time for completion in completions]
    return Run(ended - started, min(completion.metrics.time_to_first_token for completion in completions), sum(rates))
