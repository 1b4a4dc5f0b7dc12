"""Text completions: from a request to a generation, and from its outputs to OpenAI's objects."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from sonar_engine.errors import InvalidRequestError
from sonar_engine.server.answer import Answer, Parts, encode
from sonar_engine.server.choice import Choice, ChoiceDelta
from sonar_engine.server.generation import Generation
from sonar_engine.server.logprobs import completion_logprobs, num_characters
from sonar_engine.server.prompts import completion_prompts
from sonar_engine.server.protocol import CompletionRequest
from sonar_engine.server.sampling_fields import base_params, for_choice, num_choices, validated
from sonar_engine.server.state import ServerState
from sonar_engine.tokenizer import Tokenizer
from sonar_engine.types import TokenLogprobs


async def prepare_completion(request: CompletionRequest, state: ServerState, tokenizer: Tokenizer) -> CompletionAnswer:
    """An answer whose generation is ready to be opened. Raises InvalidRequestError naming what cannot be served."""
    n = num_choices(request, state.config.max_n)
    params = base_params(request, state.default_sampling, state.config, tokenizer)
    prompts = await completion_prompts(request, tokenizer, state.info, state.config)
    if len(prompts) * n > state.config.max_prompts:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with n = {n} make {len(prompts) * n} choices; at most "
            f"{state.config.max_prompts} are possible",
            param="n",
        )
    sizes = [len(prompt) for prompt in prompts]
    own = validated(params, state.info, 0 if 0 in sizes else max(sizes))  # what suits the longest suits all
    choices: list[Choice] = []
    for prompt in prompts:
        choices += [
            Choice(
                len(choices) + i,
                prompt,
                for_choice(own, i),
                tokenizer,
                mark_drafted=bool(request.return_drafted),
                is_silent=request.max_tokens == 0,
            )
            for i in range(n)
        ]
    generation = Generation(state, f"cmpl-{uuid.uuid4().hex}", choices, sum(sizes))
    return CompletionAnswer(request, generation, state, tokenizer)


class CompletionAnswer(Answer):
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, request: CompletionRequest, generation: Generation, state: ServerState, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request, generation, state, tokenizer)
        self._echoes = bool(request.echo)
        self._offsets: dict[int, int] = {}  # characters before the next token, by choice

    def opening(self) -> bytes:
        """The prompt, where it is asked for as text or as ids; its text waits where log-probabilities go with it."""
        events = b""
        for choice in self.generation.choices:
            text = "" if self._scores_echo(choice) else self._echo(choice)
            members = b',"prompt_token_ids":' + encode(choice.prompt) if self._with_ids else b""
            if text or members:
                events += self.chunk(choice.index, b'"text":' + encode(text), members, b"null")
        return events

    def delta(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """A chunk with the text; the last one of a choice may have none. A scored prompt goes before the first."""
        events = b""
        if delta.prompt_logprobs is not None and self._scores_echo(choice):
            scores = self.logprobs(choice, choice.prompt, [None, *delta.prompt_logprobs])
            members = b',"logprobs":' + encode(scores)
            events = self.chunk(choice.index, b'"text":' + encode(self._echo(choice)), members, b"null")
        return events + self._of_answer(choice, delta)

    def _of_answer(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        members = self.token_members(choice, delta)
        if not (delta.text or delta.last):
            return b""
        finish = b"null"
        if delta.last:
            members += self.stop_member(choice)
            finish = encode(choice.finish_reason)
        return self.chunk(choice.index, b'"text":' + encode(delta.text), members, finish)

    def whole_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"index": choice.index, "text": self._echo(choice) + text}

    def num_echoed(self, choice: Choice) -> int:
        return len(self._echo(choice))

    def whole_logprobs(self, choice: Choice, parts: Parts) -> dict[str, Any]:
        """With echo those of the prompt come first."""
        if not self._scores_echo(choice):
            return self.logprobs(choice, parts.ids, parts.entries)
        entries = [None, *parts.prompt_entries, *parts.entries]
        return self.logprobs(choice, choice.prompt + parts.ids, entries)

    def logprobs(self, choice: Choice, ids: list[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        tokenizer = self._tokenizer
        offset = self._offsets.get(choice.index, 0)
        self._offsets[choice.index] = offset + sum(num_characters(tokenizer, token_id) for token_id in ids)
        return completion_logprobs(tokenizer, ids, entries, offset)

    def _scores_echo(self, choice: Choice) -> bool:
        return self._echoes and choice.params.logprobs is not None

    def _echo(self, choice: Choice) -> str:
        """The prompt's text before the answer, if asked for."""
        if not self._echoes:
            return ""
        return self._tokenizer.decode(choice.prompt, skip_special_tokens=choice.params.skip_special_tokens)
