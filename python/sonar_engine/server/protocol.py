"""Request bodies. Types are strict (a string is no number), null equals absent, unknown fields are refused by name."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sonar_engine.errors import InvalidRequestError

Ids = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Body = TypeVar("Body", bound=BaseModel)


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # never added
    continuous_usage_stats: bool | None = None


class Speculative(Strict):
    """Speculation of one request; it changes the speed, not the text."""

    enabled: bool | None = None
    num_speculative_tokens: int | None = None


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
    return_metrics: bool | None = None
    speculative: Speculative | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # What has no influence on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Known names that cannot be honoured; see `UNSUPPORTED`.
    prompt_logprobs: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    spaces_between_special_tokens: Any = None
    use_beam_search: Any = None
    store: Any = None
    service_tier: Any = None


class ContentPart(Strict):
    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One turn. Other fields that an answer carries may come back as null or empty."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage]
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
    messages: list[ChatMessage] | None = None
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
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
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


def parse(model: type[Body], body: bytes) -> Body:
    """The validated body. Raises InvalidRequestError naming the first field that is wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error, model) from None


def _explain(error: ValidationError, model: type[BaseModel]) -> InvalidRequestError:
    faults = error.errors(include_url=False, include_context=False)
    same_field = [fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    first = max(same_field, key=lambda fault: len(fault["loc"]))  # of a union, the member that came closest
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not first["loc"]:
        return InvalidRequestError("the body must be a JSON object")
    param = str(first["loc"][0])
    path = ".".join(str(part) for part in first["loc"])[:200]
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(path, list(model.model_fields), n=1)
        hint = f"did you mean {close[0]}?" if close else "leave it out"
        return InvalidRequestError(f"unknown field {path}; {hint}", param=param[:200])
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
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    options = request.stream_options
    if options is not None and options.continuous_usage_stats:
        raise InvalidRequestError("continuous_usage_stats is not supported yet; leave it out", param="stream_options")
