"""Request bodies. Types are strict (a string is no number), null equals absent, unknown fields are refused by name."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sonar_engine.errors import InvalidRequestError
from sonar_engine.sampling.validation import MAX_LOGIT_BIAS, MAX_STOP_IDS, MAX_STOP_STRINGS

Ids = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Body = TypeVar("Body", bound=BaseModel)

MAX_BAD_WORDS = 1024
MAX_TURNS = 4096  # messages and their content parts, where no option says otherwise
# Entries beyond which a field is refused before any of them is looked at.
MOST_ENTRIES = {
    "logit_bias": MAX_LOGIT_BIAS,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_IDS,
    "bad_words": MAX_BAD_WORDS,
}
_UNION_MEMBER = re.compile(r"str|\[key\]|.*\[.*\]")  # what pydantic puts in a location beside names and indices


class Strict(BaseModel):
    """Unknown fields, then long ones, are refused first and one at a time: a bad body costs no more than a good one."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    field_of: ClassVar[str | None] = None  # the field of a request that holds this model; None for a whole body

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = _names(cls)
        for name in value:
            if name not in known:
                raise _unknown(cls, name)
        for name, most in MOST_ENTRIES.items():
            entries = value.get(name)
            if isinstance(entries, list | dict) and len(entries) > most:
                raise InvalidRequestError(f"{name} has {len(entries)} entries; at most {most} are possible", param=name)
        return value


def _names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _unknown(model: type[Strict], name: str) -> InvalidRequestError:
    name = name[:200]
    close = difflib.get_close_matches(name, _names(model), n=1)
    owner = model.field_of
    prefix = "" if owner is None else f"{owner}."
    hint = f"did you mean {prefix}{close[0]}?" if close else "leave it out"
    return InvalidRequestError(f"unknown field {prefix}{name}; {hint}", param=owner or name)


class StreamOptions(Strict):
    field_of = "stream_options"

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # never added
    continuous_usage_stats: bool | None = None


class Speculative(Strict):
    """Speculation of one request; it changes the speed, not the text."""

    field_of = "speculative"

    enabled: bool | None = None
    num_speculative_tokens: int | None = None


class JsonSchemaFormat(Strict):
    """OpenAI's; the schema is always followed to the letter, so `strict` says nothing."""

    field_of = "response_format"

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    field_of = "response_format"

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Strict):
    """The form of the text; one of them."""

    field_of = "structured_outputs"

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None


class GenerationRequest(Strict):
    """What chat and text completions share. Absent sampling fields take the model's own defaults."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Strings | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    return_metrics: bool | None = None
    return_drafted: bool | None = None
    speculative: Speculative | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # What has no influence on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Known names that cannot be honoured; see `UNSUPPORTED`.
    spaces_between_special_tokens: Any = None
    use_beam_search: Any = None
    store: Any = None
    service_tier: Any = None


class ChatMessage(BaseModel):
    """One turn. Other fields that an answer carries may come back as null or empty."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True)]


class ChatRequest(GenerationRequest):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # of no effect without tools
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    documents: Any = None


class CompletionRequest(GenerationRequest):
    prompt: Any = None  # a string, token ids, or a list of either; see `prompts`
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    best_of: Any = None
    suffix: Any = None


class TokenizeRequest(Strict):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool | None = None


class AbortRequest(Strict):
    request_id: str


# field -> values under which it asks for nothing
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
    "best_of": (),
    "suffix": ("",),
}


def parse(model: type[Body], body: bytes, max_turns: int = MAX_TURNS) -> Body:
    """The validated body. Raises InvalidRequestError naming the first field that is wrong.

    `max_turns` bounds messages and their content parts together.
    """
    try:
        value = pydantic_core.from_json(body)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    _check_turns(value.get("messages"), max_turns)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _explain(error) from None


def _check_turns(messages: Any, most: int) -> None:
    if not isinstance(messages, list):
        return
    count = len(messages)
    if count <= most:
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            count += len(content) if isinstance(content, list) else 0
    if count > most:
        raise InvalidRequestError(
            f"messages has {count} messages and content parts; at most {most} are possible", param="messages"
        )


def _explain(error: ValidationError) -> InvalidRequestError:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    same_field = [fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    first = max(same_field, key=lambda fault: len(fault["loc"]))  # of a union, the member that came closest
    param, *inner = (str(part) for part in first["loc"])
    path = ".".join([param, *(part for part in inner if not _UNION_MEMBER.fullmatch(part))])[:200]
    if first["type"] == "missing":
        return InvalidRequestError(f"{path} is missing", param=param)
    reason = first["msg"][:1].lower() + first["msg"][1:]
    return InvalidRequestError(f"{path}: {reason}", param=param)


def reject_unsupported(request: GenerationRequest) -> None:
    """Nothing is dropped in silence: a known field that cannot be honoured is an error that names it."""
    for field, harmless in UNSUPPORTED.items():
        value = getattr(request, field, None)
        if value is not None and not any(value == fine and type(value) is type(fine) for fine in harmless):
            raise InvalidRequestError(f"{field} is not supported yet; leave it out", param=field)
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError("prompt_logprobs needs stream to be false", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    options = request.stream_options
    if options is not None and options.continuous_usage_stats:
        raise InvalidRequestError("continuous_usage_stats is not supported yet; leave it out", param="stream_options")
