"""A request's fields as `SamplingParams`, one per choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sonar_engine.errors import InvalidRequestError
from sonar_engine.sampling.validation import MAX_STOP_LEN, validate
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from sonar_engine.server.structured import structured_output
from sonar_engine.tokenizer import Tokenizer
from sonar_engine.types import EngineInfo, SamplingParams

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions
SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "allowed_token_ids",
    "seed",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "priority",
    "cache_salt",
)
DEFAULTABLE = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
INT64 = 1 << 63


def base_params(
    request: GenerationRequest, defaults: Mapping[str, Any], limits: ServerConfig, tokenizer: Tokenizer
) -> SamplingParams:
    """What all choices of the request share, before validation. `defaults` are the model's own."""
    fields = {name: value for name, value in defaults.items() if name in DEFAULTABLE and value is not None}
    for name in SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    fields["stop"] = _stop_strings(request.stop, limits)
    fields["logit_bias"] = _logit_bias(request.logit_bias, limits)
    fields["banned_token_ids"] = _banned(request.bad_words, tokenizer)
    if request.speculative is not None:
        if request.speculative.enabled is not None:
            fields["speculative_enabled"] = request.speculative.enabled
        fields["num_speculative_tokens"] = request.speculative.num_speculative_tokens
    fields["structured"] = structured_output(request, limits)
    fields["prompt_logprobs"] = _bounded_logprobs(request.prompt_logprobs, "prompt_logprobs", limits)
    if isinstance(request, ChatRequest):
        fields |= _chat_fields(request, limits)
    elif isinstance(request, CompletionRequest):
        fields |= _completion_fields(request, limits)
    return SamplingParams(**fields)


def _chat_fields(request: ChatRequest, limits: ServerConfig) -> dict[str, Any]:
    asked = request.max_completion_tokens
    fields: dict[str, Any] = {"max_tokens": request.max_tokens if asked is None else asked}
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if request.logprobs:
        fields["logprobs"] = _bounded_logprobs(request.top_logprobs or 0, "top_logprobs", limits)
    return fields


def _completion_fields(request: CompletionRequest, limits: ServerConfig) -> dict[str, Any]:
    """`max_tokens` 0 runs for one token, which the answer leaves out."""
    asked = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    fields: dict[str, Any] = {"max_tokens": 1 if asked == 0 else asked}
    fields["logprobs"] = _bounded_logprobs(request.logprobs, "logprobs", limits)
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        fields["prompt_logprobs"] = request.logprobs
    return fields


def _bounded_logprobs(asked: int | None, field: str, limits: ServerConfig) -> int | None:
    if asked is not None and not 0 <= asked <= limits.max_logprobs:
        raise InvalidRequestError(f"{field} must be 0 to {limits.max_logprobs}, not {asked}", param=field)
    return asked


def _stop_strings(stop: str | list[str] | None, limits: ServerConfig) -> list[str]:
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if len(strings) > limits.max_stop_strings:
        raise InvalidRequestError(
            f"stop has {len(strings)} strings; at most {limits.max_stop_strings} are possible", param="stop"
        )
    for each in strings:
        if not 1 <= len(each) <= limits.max_stop_chars:
            raise InvalidRequestError(
                f"stop has a string of {len(each)} characters; each must have 1 to {limits.max_stop_chars}",
                param="stop",
            )
    return strings


def _logit_bias(bias: dict[str, float] | None, limits: ServerConfig) -> dict[int, float] | None:
    """JSON keys are strings: here they become token ids."""
    if not bias:
        return None
    if len(bias) > limits.max_logit_bias:
        raise InvalidRequestError(
            f"logit_bias has {len(bias)} entries; at most {limits.max_logit_bias} are possible", param="logit_bias"
        )
    result = {}
    for key, value in bias.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 19):
            raise InvalidRequestError(f"logit_bias keys must be token ids, not {key[:40]!r}", param="logit_bias")
        result[int(key)] = value
    return result


def _banned(words: list[str] | None, tokenizer: Tokenizer) -> list[int] | None:
    """Ids of words that are one token, at the start of a text and after a space."""
    if not words:
        return None
    banned: set[int] = set()
    for word in words:
        if len(word) > MAX_STOP_LEN:
            raise InvalidRequestError(
                f"bad_words has a word of {len(word)} characters; at most {MAX_STOP_LEN} are possible",
                param="bad_words",
            )
        spellings = [tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word.lstrip()}")]
        if not word or any(len(ids) != 1 for ids in spellings):
            raise InvalidRequestError(
                f"bad_words can forbid single tokens only; {word[:40]!r} is several", param="bad_words"
            )
        banned.update(ids[0] for ids in spellings)
    return sorted(banned)


def validated(
    params: SamplingParams, info: EngineInfo, num_prompt_tokens: int, max_field: str = "max_tokens"
) -> SamplingParams:
    """Checked against the model's limits, every default resolved. Raises InvalidRequestError naming the field."""
    try:
        return validate(
            params,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            num_prompt_tokens=num_prompt_tokens,
            eos_token_ids=info.eos_token_ids,
        )
    except InvalidRequestError as error:
        if error.param == "max_tokens":
            error.param = max_field
        raise


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Choice `index` of a seeded request has the seed `seed + index`, wrapped to 64 bits."""
    if params.seed is None or index == 0:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + index + INT64) % (2 * INT64) - INT64)


def num_choices(request: GenerationRequest, limit: int) -> int:
    """Choices per prompt."""
    n = 1 if request.n is None else request.n
    if not 1 <= n <= limit:
        shown = n if n.bit_length() <= 64 else f"a number of {n.bit_length()} bits"
        raise InvalidRequestError(f"n must be 1 to {limit}, not {shown}", param="n")
    return n
