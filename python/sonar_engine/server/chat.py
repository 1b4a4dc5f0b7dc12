"""Chat completions: from a request to a generation, and from its outputs to OpenAI's objects."""

from __future__ import annotations

import uuid
from typing import Any

from sonar_engine.server.answer import Answer, encode
from sonar_engine.server.choice import Choice, ChoiceDelta
from sonar_engine.server.generation import Generation
from sonar_engine.server.logprobs import chat_logprobs
from sonar_engine.server.prompts import chat_prompt, truncated
from sonar_engine.server.protocol import ChatRequest
from sonar_engine.server.sampling_fields import base_params, for_choice, num_choices, validated
from sonar_engine.server.state import ServerState
from sonar_engine.tokenizer import Tokenizer
from sonar_engine.types import TokenLogprobs


async def prepare_chat(request: ChatRequest, state: ServerState, tokenizer: Tokenizer) -> ChatAnswer:
    """An answer whose generation is ready to be opened. Raises InvalidRequestError naming what cannot be served."""
    n = num_choices(request, state.config.max_n)
    params = base_params(request, state.default_sampling, state.config, tokenizer)
    prompt = await chat_prompt(request, tokenizer, state.config.max_prompt_chars)
    prompt = truncated(prompt, request.truncate_prompt_tokens, state.info)
    max_field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    params = validated(params, state.info, len(prompt), max_field)
    mark_drafted = bool(request.return_drafted)
    choices = [
        Choice(index, prompt, for_choice(params, index), tokenizer, mark_drafted=mark_drafted) for index in range(n)
    ]
    generation = Generation(state, f"chatcmpl-{uuid.uuid4().hex}", choices, len(prompt))
    return ChatAnswer(request, generation, state, tokenizer)


class ChatAnswer(Answer):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    one_prompt = True

    def opening(self) -> bytes:
        """The role, once for every choice."""
        choices = self.generation.choices
        members = b',"prompt_token_ids":' + encode(choices[0].prompt) if self._with_ids else b""
        return b"".join(
            self.chunk(choice.index, b'"delta":{"role":"assistant"}', members, b"null") for choice in choices
        )

    def delta(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """A chunk with the text, if any, and one with the finish reason at the end."""
        members = self.token_members(choice, delta)
        events = b""
        if delta.text:
            events = self.chunk(choice.index, b'"delta":{"content":%s}' % encode(delta.text), members, b"null")
            members = b""
        if delta.last:
            members += self.stop_member(choice)
            events += self.chunk(choice.index, b'"delta":{}', members, encode(choice.finish_reason))
        return events

    def whole_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"index": choice.index, "message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, choice: Choice, ids: list[int], entries: list[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, ids, entries)
