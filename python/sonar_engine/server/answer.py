"""What chat and text answers share: collecting a whole answer, and rendering chunks of a streamed one."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from sonar_engine.drafted_text import Ranges, append_range
from sonar_engine.server.choice import Choice, ChoiceDelta
from sonar_engine.server.generation import Generation
from sonar_engine.server.logprobs import prompt_logprobs
from sonar_engine.server.protocol import GenerationRequest
from sonar_engine.server.state import ServerState
from sonar_engine.tokenizer import Tokenizer
from sonar_engine.types import TokenLogprobs

encode = msgspec.json.encode


class Answer:
    """One response in the making. Chunks are put together from bytes: they are the server's work per token."""

    whole_object = ""
    chunk_object = ""
    one_prompt = False  # all choices have the same, so that what it gives is the answer's and not a choice's

    def __init__(
        self, request: GenerationRequest, generation: Generation, state: ServerState, tokenizer: Tokenizer
    ) -> None:
        self.generation = generation
        self._tokenizer = tokenizer
        self._with_prompt_logprobs = request.prompt_logprobs is not None
        self._with_ids = bool(request.return_token_ids)
        self._with_metrics = bool(request.return_metrics) or state.config.per_request_metrics
        self._with_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        self._common = {"created": int(time.time()), "model": state.model_name}
        head = encode({"id": generation.response_id, "object": self.chunk_object, **self._common})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if self._with_usage else b"}\n\n"
        self._held: dict[int, tuple[list[int], list[TokenLogprobs]]] = {}  # waits for its text, by choice

    # What the two kinds do differently

    def opening(self) -> bytes:
        raise NotImplementedError

    def delta(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        raise NotImplementedError

    def whole_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self, choice: Choice, ids: list[int], entries: list[TokenLogprobs]) -> dict[str, Any]:
        raise NotImplementedError

    def num_echoed(self, choice: Choice) -> int:
        """Characters that a whole answer has before the generated text."""
        return 0

    # Streaming

    def chunk(self, index: int, content: bytes, extra: bytes, finish: bytes) -> bytes:
        """One event. `content` is the choice's text member, `extra` further members with leading commas."""
        if b'"logprobs":' not in extra:
            extra = b',"logprobs":null' + extra
        return b'%s{"index":%d,%s%s,"finish_reason":%s}]%s' % (self._head, index, content, extra, finish, self._tail)

    def token_members(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """What the chunk says of its text and tokens; tokens without text wait for the next text or the end."""
        members = b"" if delta.drafted is None or not delta.text else b',"drafted":' + encode(delta.drafted)
        if delta.logprobs is None and not self._with_ids:
            return members
        ids, entries = self._held.pop(choice.index, ([], []))
        ids, entries = ids + delta.token_ids, entries + (delta.logprobs or [])
        if not delta.text and not delta.last:
            self._held[choice.index] = (ids, entries)
            return members
        if delta.logprobs is not None and ids:
            members += b',"logprobs":' + encode(self.logprobs(choice, ids, entries))
        if self._with_ids and ids:
            members += b',"token_ids":' + encode(ids)
        return members

    def stop_member(self, choice: Choice) -> bytes:
        return b"" if choice.stop_reason is None else b',"stop_reason":' + encode(choice.stop_reason)

    def closing(self) -> bytes:
        """The last chunk: no choices, the full usage, metrics if asked for. Nothing when neither was."""
        metrics = self.generation.metrics() if self._with_metrics else None
        members = b',"usage":' + encode(self.generation.usage()) if self._with_usage else b""
        if metrics is not None:
            members += b',"metrics":' + encode(metrics)
        return self._head + b"]" + members + b"}\n\n" if members else b""

    # Whole

    async def whole(self) -> bytes:
        """The JSON of the finished answer."""
        choices = self.generation.choices
        parts = [Parts(self.num_echoed(choice)) for choice in choices]
        async for deltas in self.generation.deltas():
            for choice, delta in deltas:
                parts[choice.index].add(delta)
        answer: dict[str, Any] = {"id": self.generation.response_id, "object": self.whole_object, **self._common}
        answer["choices"] = [self._whole_choice(choice, parts[choice.index]) for choice in choices]
        answer["usage"] = self.generation.usage()
        if self._with_prompt_logprobs and self.one_prompt:
            answer["prompt_logprobs"] = prompt_logprobs(self._tokenizer, choices[0].prompt, parts[0].prompt_entries)
        if self._with_metrics:
            answer["metrics"] = self.generation.metrics()
        return encode(answer)

    def whole_logprobs(self, choice: Choice, parts: Parts) -> dict[str, Any]:
        return self.logprobs(choice, parts.ids, parts.entries)

    def _whole_choice(self, choice: Choice, parts: Parts) -> dict[str, Any]:
        asked = choice.params.logprobs is not None
        result = self.whole_choice(choice, "".join(parts.texts)) | {
            "logprobs": self.whole_logprobs(choice, parts) if asked else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._with_ids:
            result |= {"token_ids": parts.ids, "prompt_token_ids": choice.prompt}
        if parts.drafted is not None:
            result["drafted"] = parts.drafted
        if self._with_prompt_logprobs and not self.one_prompt:
            result["prompt_logprobs"] = prompt_logprobs(self._tokenizer, choice.prompt, parts.prompt_entries)
        return result


class Parts:
    """What a whole answer's choice is put together from; its text starts after `num_chars` others."""

    def __init__(self, num_chars: int) -> None:
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.entries: list[TokenLogprobs] = []
        self.prompt_entries: list[TokenLogprobs] = []
        self.drafted: Ranges | None = None
        self._num_chars = num_chars

    def add(self, delta: ChoiceDelta) -> None:
        self.texts.append(delta.text)
        self.ids += delta.token_ids
        self.entries += delta.logprobs or []
        self.prompt_entries += delta.prompt_logprobs or []
        if delta.drafted is not None:
            self.drafted = [] if self.drafted is None else self.drafted
            for start, end in delta.drafted:
                append_range(self.drafted, self._num_chars + start, self._num_chars + end)
        self._num_chars += len(delta.text)
