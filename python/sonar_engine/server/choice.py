"""One sequence of a response: tokens come in, text and its end come out."""

from __future__ import annotations

import msgspec

from sonar_engine.detokenizer import IncrementalDetokenizer
from sonar_engine.drafted_text import Ranges
from sonar_engine.tokenizer import Tokenizer
from sonar_engine.types import FinishReason, RequestMetrics, RequestOutput, SamplingParams, TokenLogprobs


class ChoiceDelta(msgspec.Struct):
    """What one output added; nothing follows the `last`.

    `logprobs` has an entry a token, and `drafted` the ranges of the text that were drafted, when they were asked for.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    last: bool
    drafted: Ranges | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first tokens, if asked for


class Choice:
    """`index` is the choice's place in the response, `prompt` the ids it continues."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        mark_drafted: bool = False,
        is_silent: bool = False,
    ) -> None:
        """`is_silent`: the tokens are not wanted, only what the prompt gives."""
        self.index = index
        self.prompt = prompt
        self.params = params
        self._is_silent = is_silent
        self.request_id = -1
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.metrics: RequestMetrics | None = None
        self._detokenizer = IncrementalDetokenizer(tokenizer, params, mark_drafted=mark_drafted)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def feed(self, output: RequestOutput) -> ChoiceDelta | None:
        """None when a stop string had ended the choice before. After the call `ended` may have become true."""
        self.metrics = output.metrics or self.metrics
        if self.ended:
            return None
        if self._is_silent:
            return self._without_tokens(output)
        delta = self._detokenizer.add(output.token_ids, output.finish_reason, output.num_accepted)
        token_ids, logprobs = output.token_ids, output.logprobs
        if delta.stop is not None:
            self.finish_reason, self.stop_reason = "stop", delta.stop
            token_ids = token_ids[: delta.num_tokens]
            logprobs = None if logprobs is None else logprobs[: delta.num_tokens]
        elif output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.num_tokens += len(token_ids)
        return ChoiceDelta(delta.text, token_ids, logprobs, self.ended, delta.drafted, output.prompt_logprobs)

    def _without_tokens(self, output: RequestOutput) -> ChoiceDelta:
        if output.finish_reason is not None:
            self.finish_reason = "length" if output.finish_reason == "stop" else output.finish_reason
        logprobs: list[TokenLogprobs] | None = None if output.logprobs is None else []
        return ChoiceDelta("", [], logprobs, self.ended, prompt_logprobs=output.prompt_logprobs)
