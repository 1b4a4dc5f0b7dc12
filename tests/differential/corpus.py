"""Requests of every kind, made from a seed, and what an answer says, streamed or not, in one form."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from server_harness import CHAT, COMPLETIONS, Events

WORDS = ["the", "cat", "sat", "on", "mat", "and", "dog", "ate", "other", "hat", "in", "sun"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["cat", "dog"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Request:
    path: str
    body: dict[str, Any]


def make_corpus(count: int, seed: int = 0) -> list[Request]:
    """Half of them greedy, half seeded at temperature 1; every field that shapes a text occurs."""
    rng = random.Random(seed)
    return [_request(rng, index) for index in range(count)]


def _request(rng: random.Random, index: int) -> Request:
    body = _sampling(rng, index) | _ends(rng) | _shape(rng)
    words = [rng.choice(WORDS) for _ in range(rng.randint(2, 14))]
    text = " ".join((words * 4 if index % 3 == 0 else words)[:24]) + f" {index}"
    if index % 2:
        body["messages"] = [{"role": "user", "content": text}]
        if rng.random() < 0.5:
            body |= {"logprobs": True, "top_logprobs": rng.randint(0, 4)}
        return Request(CHAT, body)
    body["prompt"] = text
    if rng.random() < 0.5:
        body["logprobs"] = rng.randint(0, 4)
    if rng.random() < 0.2 and "n" not in body:
        body["echo"] = True
    return Request(COMPLETIONS, body)


def _sampling(rng: random.Random, index: int) -> dict[str, Any]:
    seeded = index % 4 >= 2
    body: dict[str, Any] = {"temperature": 1.0, "seed": rng.randrange(1000)} if seeded else {"temperature": 0.0}
    if seeded and rng.random() < 0.4:
        body |= {"top_p": 0.9, "top_k": 40, "min_p": 0.01}
    if rng.random() < 0.25:
        body |= {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2}
    if rng.random() < 0.2:
        body["logit_bias"] = {str(rng.randrange(3, 320)): 3.0, str(rng.randrange(3, 320)): -100}
    if rng.random() < 0.15:
        body["allowed_token_ids"] = list(range(2, 300, 2))
    return body


def _ends(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": rng.choice([1, 5, 17, 40])}
    if rng.random() < 0.3:
        body["stop"] = rng.sample(["a", "e", "th", "Q", "\u0120", "the cat"], 2)
        body["include_stop_str_in_output"] = rng.random() < 0.5
    if rng.random() < 0.2:
        body["stop_token_ids"] = rng.sample(range(3, 320), 25)
    if rng.random() < 0.2:
        body["min_tokens"] = min(4, body["max_tokens"])
    return body


def _shape(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"return_token_ids": True}
    drawn = rng.random()
    if drawn < 0.1:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    elif drawn < 0.2:
        body["structured_outputs"] = {"regex": "(cat|dog)( the| sat| mat){2,9}[.]"}
    elif drawn < 0.35:
        body["ignore_eos"] = True
    if rng.random() < 0.15:
        body["n"] = 2
    return body


@dataclass
class Said:
    """What one choice says."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None


@dataclass
class Answer:
    choices: dict[int, Said] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)


def answer_of_whole(content: dict[str, Any]) -> Answer:
    return _collect([content])


def answer_of_stream(body: str) -> Answer:
    events = Events.read(body)
    assert all("error" not in chunk for chunk in events.chunks)
    return _collect(events.chunks)


def _collect(parts: Iterable[dict[str, Any]]) -> Answer:
    answer = Answer()
    for part in parts:
        if part.get("usage"):
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            answer.usage = {name: part["usage"][name] for name in names}
        for choice in part["choices"]:
            _add(answer.choices.setdefault(choice["index"], Said()), choice)
    return answer


def _add(said: Said, choice: dict[str, Any]) -> None:
    message = choice.get("message") or choice.get("delta") or choice
    said.text += message.get("content") or message.get("text") or ""
    said.ids += choice.get("token_ids") or []
    said.logprobs += _entries(choice.get("logprobs"))
    said.finish_reason = choice.get("finish_reason") or said.finish_reason
    if choice.get("stop_reason") is not None:
        said.stop_reason = choice["stop_reason"]


def _entries(logprobs: dict[str, Any] | None) -> list[Any]:
    """One entry a token, of either route's form."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [json.dumps(entry, sort_keys=True) for entry in logprobs["content"] or []]
    columns = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    columns = [column if column is not None else [None] * len(columns[0]) for column in columns]
    return list(zip(*columns, strict=True))
