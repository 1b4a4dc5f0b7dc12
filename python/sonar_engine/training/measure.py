"""Acceptance and speed of a head, measured in the engine that serves it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sonar_engine.engine import Engine, Progress
from sonar_engine.tokenizer import Tokenizer
from sonar_engine.training.prompts import ChatPrompt
from sonar_engine.training.streamed import Answer, Request, Task, TaskRunner
from sonar_engine.training.texts import Text
from sonar_engine.training.walk import Walked
from sonar_engine.types import SamplingParams


@dataclass(frozen=True)
class Measured:
    """One answer and the drafts of its decoding. `was_cut`: it ended by length."""

    task: str
    text: Text
    walked: Walked
    was_cut: bool


def measure_acceptance(
    engine: Engine, prompts: list[ChatPrompt], params: SamplingParams, progress: Progress
) -> list[Measured]:
    """Answers to all prompts, as many at once as the engine takes; `engine` drafts."""
    num_steps = engine.config.speculative.num_speculative_tokens
    room = engine.info.max_model_len - (params.max_tokens or 0)

    def task(index: int, prompt: ChatPrompt) -> Task[Measured]:
        tokens = encoded(engine.tokenizer, prompt, room)
        answer = yield Request(tokens, params)
        whole = np.array(tokens + answer.token_ids, np.int32)
        text = Text(index, prompt.source, params.temperature, whole, len(tokens))
        return Measured(prompt.task, text, walked_of(answer, num_steps), answer.finish_reason == "length")

    runner = TaskRunner(engine, 4 * engine.config.max_num_seqs)
    results = []
    for measured in runner.run(task(index, prompt) for index, prompt in enumerate(prompts)):
        results.append(measured)
        progress(f"Measuring at temperature {params.temperature:g}", len(results), len(prompts))
    return results


def encoded(tokenizer: Tokenizer, prompt: ChatPrompt, room: int) -> list[int]:
    """A prompt of more than `room` tokens loses its beginning."""
    return tokenizer.apply_chat_template(prompt.messages)[-room:]


def walked_of(answer: Answer, num_steps: int) -> Walked:
    """From the request's own metrics."""
    accepted = np.zeros(num_steps + 1, np.int64)
    histogram = answer.metrics.speculation.acceptance_histogram
    accepted[: len(histogram)] = histogram
    return Walked(accepted)


@dataclass(frozen=True)
class Speed:
    """Tokens/s of one greedy stream, the prompt's time included, over the same prompts on both engines."""

    plain: float
    drafting: float
    same_tokens: int  # prompts whose answers are the same ids
    num_prompts: int


def measure_speed(drafting: Engine, plain: Engine, prompts: list[ChatPrompt], max_tokens: int) -> Speed:
    """The engines take turns at each prompt, so that other load of the machine meets both."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    seconds, same, num_tokens = [0.0, 0.0], 0, 0
    for tokens in _in_turn(drafting, prompts, max_tokens):
        outputs = []
        for which, engine in enumerate((plain, drafting)):
            started = time.perf_counter()
            outputs.append(engine.generate([tokens], params)[0].token_ids)
            seconds[which] += time.perf_counter() - started
        num_tokens += len(outputs[0])
        same += outputs[0] == outputs[1]
    return Speed(num_tokens / seconds[0], num_tokens / seconds[1], same, len(prompts))


def _in_turn(engine: Engine, prompts: list[ChatPrompt], max_tokens: int) -> Iterator[list[int]]:
    for prompt in prompts:
        yield encoded(engine.tokenizer, prompt, engine.info.max_model_len - max_tokens)
