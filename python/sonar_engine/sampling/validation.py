"""The one validator of sampling parameters: every field, its type and range, and what only works together.

Called where a request is submitted; what passes can neither fail nor fault later on, whatever else is in its batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NoReturn, get_args

import msgspec

from sonar_engine.errors import InvalidRequestError
from sonar_engine.types import SamplingParams, StructuredKind, StructuredOutput

GREEDY_BELOW = 1e-5  # temperatures below count as 0, as in vLLM: dividing by them overflows
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 256  # characters
MAX_STOP_IDS = 1024
MAX_SALT_LEN = 256  # characters
MAX_STRUCTURED_BYTES = 1 << 20  # of a schema, regular expression, grammar or list of choices
LARGEST = 3.4e38  # what fp32 holds
_INT32, _INT64 = 1 << 31, 1 << 63


def validate(
    params: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    num_prompt_tokens: int,
    max_logprobs: int = 20,
    eos_token_ids: Collection[int] = (),
) -> SamplingParams:
    """The same parameters with their defaults resolved: `max_tokens` is a number, `top_k` -1 is 0, repeats are gone.

    `vocab_size` is the width of the logits. `eos_token_ids` are those that `min_tokens` forbids.
    Raises InvalidRequestError naming the field; `context_length_exceeded` is the code of a prompt too long.
    """
    _check_shape(params, max_logprobs)
    _check_flags(params)
    _check_stop_strings(params.stop)
    _check_structured(params)
    allowed = params.allowed_token_ids
    changes = {
        "temperature": 0.0 if params.temperature < GREEDY_BELOW else float(params.temperature),
        "top_k": params.top_k if 0 < params.top_k < vocab_size else 0,
        "max_tokens": _max_tokens(params, max_model_len, num_prompt_tokens),
        "logit_bias": _logit_bias(params.logit_bias, vocab_size),
        "allowed_token_ids": None if allowed is None else _ids("allowed_token_ids", allowed, vocab_size, vocab_size),
        "banned_token_ids": _ids("banned_token_ids", params.banned_token_ids or [], vocab_size, vocab_size) or None,
        "stop_token_ids": _ids("stop_token_ids", params.stop_token_ids, vocab_size, MAX_STOP_IDS),
    }
    result = msgspec.structs.replace(params, **changes)
    _check_something_is_left(result, vocab_size, eos_token_ids)
    return result


def validate_for_any_model(params: SamplingParams) -> None:
    """Raises InvalidRequestError for what no model can follow, where the model is not known yet."""
    validate(params, vocab_size=_INT32 - 1, max_model_len=_INT64 - 1, num_prompt_tokens=1)


def _reject(field: str, message: str, code: str | None = None) -> NoReturn:
    raise InvalidRequestError(f"{field} {message}", param=field, code=code)


def _check_shape(params: SamplingParams, max_logprobs: int) -> None:
    """The numbers that shape the distribution, and the counts."""
    _number("temperature", params.temperature, 0, LARGEST)
    _integer("top_k", params.top_k, -1, _INT64 - 1)
    _number("top_p", params.top_p, 0, 1, above=True)
    _number("min_p", params.min_p, 0, 1)
    _number("repetition_penalty", params.repetition_penalty, 1e-6, 1e6)
    _number("presence_penalty", params.presence_penalty, -2, 2)
    _number("frequency_penalty", params.frequency_penalty, -2, 2)
    if params.seed is not None:
        _integer("seed", params.seed, -_INT64, _INT64 - 1)
    for field in ("logprobs", "prompt_logprobs"):
        if getattr(params, field) is not None:
            _integer(field, getattr(params, field), 0, max_logprobs)
    if params.num_speculative_tokens is not None:
        _integer("num_speculative_tokens", params.num_speculative_tokens, 0, _INT32 - 1)
    _integer("priority", params.priority, -_INT32, _INT32 - 1)


def _check_flags(params: SamplingParams) -> None:
    for field in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "speculative_enabled"):
        if not isinstance(getattr(params, field), bool):
            _reject(field, f"must be true or false, not {_shown(getattr(params, field))}")
    salt = params.cache_salt
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT_LEN):
        _reject("cache_salt", f"must be a string of 1 to {MAX_SALT_LEN} characters, not {_shown(salt)}")


def _check_structured(params: SamplingParams) -> None:
    form = params.structured
    if form is None:
        return
    kinds = get_args(StructuredKind)
    if not isinstance(form, StructuredOutput) or form.kind not in kinds or not isinstance(form.content, str):
        _reject("structured", f"must be a StructuredOutput of kind {', '.join(kinds)} with text, not {_shown(form)}")
    size = len(form.content.encode(errors="replace"))
    if size > MAX_STRUCTURED_BYTES:
        _reject("structured", f"has {size} bytes; at most {MAX_STRUCTURED_BYTES} are possible")
    if params.ignore_eos:
        _reject("ignore_eos", "cannot go with structured output, which ends with its last token")


def _check_stop_strings(stop: Any) -> None:
    if not isinstance(stop, list | tuple) or not all(isinstance(each, str) for each in stop):
        _reject("stop", f"must be a list of strings, not {_shown(stop)}")
    if len(stop) > MAX_STOP_STRINGS:
        _reject("stop", f"has {len(stop)} strings; at most {MAX_STOP_STRINGS} are possible")
    for each in stop:
        if not 1 <= len(each) <= MAX_STOP_LEN:
            _reject("stop", f"has a string of {len(each)} characters; each must have 1 to {MAX_STOP_LEN}")


def _max_tokens(params: SamplingParams, max_model_len: int, num_prompt_tokens: int) -> int:
    """How many tokens may be emitted: prompt and output together fill at most the context."""
    if num_prompt_tokens < 1:
        raise InvalidRequestError("the prompt is empty; give at least one token", param="prompt")
    room = max_model_len - num_prompt_tokens
    asked = params.max_tokens
    if asked is not None:
        _integer("max_tokens", asked, 1, _INT64 - 1)
    if room < 1 or (asked is not None and asked > room):
        _reject_length(asked, max_model_len, num_prompt_tokens)
    max_tokens = room if asked is None else asked
    _integer("min_tokens", params.min_tokens, 0, _INT64 - 1)
    if params.min_tokens > max_tokens:
        _reject("min_tokens", f"({params.min_tokens}) is above max_tokens ({max_tokens})")
    return max_tokens


def _reject_length(asked: int | None, max_model_len: int, num_prompt_tokens: int) -> NoReturn:
    output = "at least 1 output token" if asked is None else f"{asked} output tokens (max_tokens)"
    room = max_model_len - num_prompt_tokens
    way_out = f"ask for at most {room} or shorten the prompt" if room > 0 else "shorten the prompt"
    raise InvalidRequestError(
        f"the context length is {max_model_len} tokens, but the prompt has {num_prompt_tokens} tokens and {output} "
        f"were asked for; {way_out}",
        param="max_tokens" if room > 0 else "prompt",
        code="context_length_exceeded",
    )


def _logit_bias(bias: Any, vocab_size: int) -> dict[int, float] | None:
    if not bias and (bias is None or isinstance(bias, dict)):
        return None
    if not isinstance(bias, dict):
        _reject("logit_bias", f"must map token ids to numbers, not {_shown(bias)}")
    if len(bias) > MAX_LOGIT_BIAS:
        _reject("logit_bias", f"has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are possible")
    for token, value in bias.items():
        _id("logit_bias", token, vocab_size)
        _number("logit_bias", value, -100, 100)
    return {int(token): float(value) for token, value in bias.items()}


def _ids(field: str, ids: Sequence[int], vocab_size: int, most: int) -> list[int]:
    """Without repeats, in order. `most` bounds the entries, repeats counted."""
    if not isinstance(ids, list | tuple):
        _reject(field, f"must be a list of token ids, not {_shown(ids)}")
    if len(ids) > most:
        _reject(field, f"has {len(ids)} entries; at most {most} are possible")
    for token in ids:
        _id(field, token, vocab_size)
    return list(dict.fromkeys(ids))


def _id(field: str, token: Any, vocab_size: int) -> None:
    if isinstance(token, bool) or not isinstance(token, int):
        _reject(field, f"holds {_shown(token)}; token ids are integers")
    if not 0 <= token < vocab_size:
        _reject(field, f"holds token id {_shown(token)}; ids are 0 to {vocab_size - 1}")


def _check_something_is_left(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    """At every position at least one token must stay possible."""
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        _reject("allowed_token_ids", "is empty; leave it out or allow at least one token id")
    banned = set(params.banned_token_ids or ())
    ends = {*params.stop_token_ids, *eos_token_ids} if params.min_tokens else set()
    allowed = params.allowed_token_ids
    pool = set(allowed) if allowed is not None else None
    of_what = "the allowed tokens" if pool is not None else "all tokens"
    if (len(pool - banned) if pool is not None else vocab_size - len(banned)) < 1:
        _reject("banned_token_ids", f"forbids {of_what}; at least one must stay possible")
    forbidden = banned | ends
    if (len(pool - forbidden) if pool is not None else vocab_size - len(forbidden)) < 1:
        _reject("min_tokens", f"is above 0, but {of_what} left end the text; allow one that does not")


def _number(field: str, value: Any, least: float, most: float, *, above: bool = False) -> None:
    """A finite number within [least, most], or (least, most] with `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        _reject(field, f"must be a number, not {_shown(value)}")
    fits = (value > least if above else value >= least) and value <= most  # NaN fits nowhere
    if not fits:
        wanted = f"{'above' if above else 'at least'} {least}"
        wanted += " and finite" if most == LARGEST else f" and at most {most}"
        _reject(field, f"must be {wanted}, not {_shown(value)}")


def _integer(field: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _reject(field, f"must be an integer, not {_shown(value)}")
    if not least <= value <= most:
        wanted = f"at least {least}" if value < least and most == _INT64 - 1 else f"{least} to {most}"
        _reject(field, f"must be {wanted}, not {_shown(value)}")


def _shown(value: Any) -> str:
    """The value for a message, cut short; numbers too long to print are described."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple | dict) and len(value) > 16:
        return f"a {type(value).__name__} of {len(value)} entries"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
