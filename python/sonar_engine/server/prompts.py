"""What a request asks to continue, as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from sonar_engine.errors import InvalidRequestError
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.protocol import ChatMessage, ChatRequest, CompletionRequest, TokenizeRequest
from sonar_engine.tokenizer import Tokenizer
from sonar_engine.types import EngineInfo

RESERVED_KWARGS = frozenset({"self", "messages", "tools", "tokenize", "chat_template", "documents"})
LONG_TEXT = 8192  # characters; beyond, tokenising leaves the event loop
TURN_SIZE = 128  # characters that rendering one message counts for
Result = TypeVar("Result")


async def off_loop(work: Callable[[], Result], size: int) -> Result:
    """Run in a thread when `size` characters are many, so that other streams keep flowing."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()


def parse_prompts(value: Any, max_prompts: int) -> list[str | list[int]]:
    """A string, token ids, or a list of either, as a list of prompts none of which is empty."""
    if value is None:
        raise InvalidRequestError("prompt is missing", param="prompt")
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list):
        raise InvalidRequestError("prompt must be a string, token ids, or a list of either", param="prompt")
    if not value:
        raise InvalidRequestError("prompt is an empty list; give at least one prompt", param="prompt")
    if len(value) > max_prompts:
        raise InvalidRequestError(
            f"prompt has {len(value)} prompts; at most {max_prompts} are possible", param="prompt"
        )
    for prompt in value:
        if not (isinstance(prompt, str) or _is_ids(prompt) or prompt == []):
            raise InvalidRequestError("prompt must be a string, token ids, or a list of either", param="prompt")
        if not prompt:
            raise InvalidRequestError("the prompt is empty; give at least one token", param="prompt")
    return value


def check_text(text: str, tokenizer: Tokenizer, info: EngineInfo, max_chars: int, truncates: bool = False) -> None:
    """Refuses what is too long to be worth tokenising: beyond `max_chars`, or sure not to fit the context."""
    if len(text) > max_chars:
        raise InvalidRequestError(
            f"the prompt has {len(text)} characters; at most {max_chars} are possible", param="prompt"
        )
    longest = tokenizer.max_token_chars
    if longest is not None and not truncates and len(text) > info.max_model_len * longest:
        _reject_length(f"at least {-(-len(text) // longest)}", info)


def _reject_length(num_tokens: int | str, info: EngineInfo) -> NoReturn:
    raise InvalidRequestError(
        f"the context length is {info.max_model_len} tokens, but the prompt has {num_tokens} tokens; "
        "shorten the prompt",
        param="prompt",
        code="context_length_exceeded",
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


async def completion_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, info: EngineInfo, limits: ServerConfig
) -> list[list[int]]:
    """Token ids of each prompt."""
    special = True if request.add_special_tokens is None else request.add_special_tokens
    keep = request.truncate_prompt_tokens
    prompts = parse_prompts(request.prompt, limits.max_prompts)
    for prompt in prompts:  # all of them before the first is tokenised
        if isinstance(prompt, str):
            check_text(prompt, tokenizer, info, limits.max_prompt_chars, keep is not None)
        elif keep is None and len(prompt) > info.max_model_len:
            _reject_length(len(prompt), info)
    result = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = await off_loop(lambda text=prompt: tokenizer.encode(text, special), len(prompt))  # type: ignore[misc]
            ids = truncated(ids, keep, info)
        else:
            ids = truncated(prompt, keep, info)
            check_ids(ids, info, "prompt")
        result.append(ids)
    return result


async def chat_prompt(request: ChatRequest | TokenizeRequest, tokenizer: Tokenizer, max_chars: int) -> list[int]:
    """Token ids of the messages under the model's own chat template."""
    messages = [_message(message) for message in request.messages or ()]
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message", param="messages")
    going_on = bool(request.continue_final_message)
    adding = not going_on if request.add_generation_prompt is None else request.add_generation_prompt
    if going_on and adding:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other; set one of them",
            param="continue_final_message",
        )
    kwargs = request.chat_template_kwargs or {}
    reserved = RESERVED_KWARGS & kwargs.keys()
    if reserved:
        name = min(reserved)
        raise InvalidRequestError(f"chat_template_kwargs may not set {name}", param="chat_template_kwargs")
    size = sum(len(message.get("content") or "") for message in messages)
    if size > max_chars:
        raise InvalidRequestError(
            f"messages have {size} characters; at most {max_chars} are possible", param="messages"
        )
    size += TURN_SIZE * len(messages)
    if kwargs or any(message.keys() - {"role", "content"} for message in messages):
        size += LONG_TEXT  # of unknown size
    options = {**kwargs, "add_generation_prompt": adding, "continue_final_message": going_on}
    return await off_loop(lambda: tokenizer.apply_chat_template(messages, **options), size)


def _message(message: ChatMessage) -> dict[str, Any]:
    """A turn as templates take it: text parts joined, `developer` as `system`, empty extras dropped."""
    extras = {key: value for key, value in (message.model_extra or {}).items() if value not in (None, [], {}, "")}
    unknown = extras.keys() - {"name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"}
    if unknown:
        raise InvalidRequestError(f"messages: unknown field {min(unknown)[:80]}; leave it out", param="messages")
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_text_of(part) for part in content)
    if content is None:
        if message.role != "assistant":
            raise InvalidRequestError(f"messages: a {message.role} message needs content", param="messages")
        content = ""
    return {"role": role, "content": content, **extras}


def _text_of(part: dict[str, Any]) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        kind = str(part.get("type"))[:40]
        raise InvalidRequestError(f"messages: content parts must be text, not {kind}", param="messages")
    return text


def truncated(ids: list[int], keep: int | None, info: EngineInfo) -> list[int]:
    """The last `keep` ids; -1 keeps what leaves room for one token."""
    if keep is None:
        return ids
    if keep < -1 or keep == 0 or keep > info.max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or 1 to {info.max_model_len}, not {keep}",
            param="truncate_prompt_tokens",
        )
    return ids[-(info.max_model_len - 1 if keep == -1 else keep) :]


def check_ids(ids: list[int], info: EngineInfo, param: str) -> None:
    """Every id is a row of the logits. Raises InvalidRequestError with the first that is not."""
    for token in ids:
        if not 0 <= token < info.vocab_size:
            shown = token if token.bit_length() <= 64 else f"of {token.bit_length()} bits"
            raise InvalidRequestError(
                f"{param} holds token id {shown}; ids are 0 to {info.vocab_size - 1}", param=param
            )
