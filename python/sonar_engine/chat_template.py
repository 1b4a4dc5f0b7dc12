"""A model's chat template (Jinja), rendered in a sandbox with bounds on time and size.

Same contract as transformers' `apply_chat_template`: trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson`, the generation tag, and messages as plain JSON values. Templates come from model files,
which may be hostile: no attribute that starts with an underscore, no mutation, no import, no file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sonar_engine.errors import InvalidRequestError

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_RENDERED_CHARACTERS = 1 << 24
MAX_SECONDS = 5.0
_DEADLINE = "_render_deadline"  # monotonic seconds, in the variables of one rendering
_CONTINUE_MARK = "CONTINUE-7c1f0a9e-HERE"  # stands where the final message ends; plain letters survive any escaping


class ChatTemplate:
    """One or several named template sources (`default`, `tool_use`), compiled on first use."""

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def sources(self) -> dict[str, str]:
        """The templates by name."""
        return dict(self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises InvalidRequestError for messages that the template refuses or cannot render."""
        if not messages:
            raise InvalidRequestError("messages must hold at least one message", "messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one to false",
                "continue_final_message",
            )
        chat = [_plain_message(message) for message in messages]
        if continue_final_message:
            _mark_end(chat[-1])
        values = {**self._special_tokens, **_plain(dict(variables or {}))}
        values |= {"messages": chat, "tools": _plain(list(tools)) if tools else None}
        values |= {"add_generation_prompt": add_generation_prompt, _DEADLINE: time.monotonic() + MAX_SECONDS}
        text = self._run("tool_use" if tools and "tool_use" in self._sources else "default", values)
        return _cut_at_mark(text) if continue_final_message else text

    def _run(self, name: str, values: dict[str, Any]) -> str:
        try:
            template = self._template(name)
            pieces: list[str] = []
            room = MAX_RENDERED_CHARACTERS
            for piece in template.generate(values):
                room -= len(piece)
                if room < 0 or time.monotonic() > values[_DEADLINE]:
                    raise InvalidRequestError(
                        f"the chat template needs more than {MAX_SECONDS:g} s or {MAX_RENDERED_CHARACTERS} characters "
                        "for these messages",
                        "messages",
                    )
                pieces.append(piece)
            return "".join(pieces)
        except InvalidRequestError:
            raise
        except Exception as error:  # a template may raise anything; whatever it is, this request cannot be rendered
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {reason}", "messages"
            ) from None

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            source = self._sources.get(name)
            if source is None:
                known = ", ".join(sorted(self._sources))
                raise InvalidRequestError(f"the model has no {name!r} chat template, only {known}", "messages")
            if len(source) > MAX_TEMPLATE_CHARACTERS:
                raise InvalidRequestError(f"the chat template exceeds {MAX_TEMPLATE_CHARACTERS} characters", "messages")
            self._compiled[name] = _environment().from_string(source)
        return self._compiled[name]


class _GenerationTag(Extension):
    """`{% generation %}..{% endgeneration %}` marks assistant text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Checks the deadline at every call and operator, and the size of what operators may blow up."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_deadline(context)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_deadline(context)
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise jinja2.exceptions.SecurityError("exponent above 64 in a chat template")
        if operator == "%" and isinstance(left, str):
            raise jinja2.exceptions.SecurityError("string formatting with % in a chat template")
        if operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


def _check_deadline(context: Context) -> None:
    # `parent` holds what the renderer passed in; assignments of the template go elsewhere.
    if time.monotonic() > context.parent[_DEADLINE]:
        raise jinja2.exceptions.SecurityError(f"rendering takes more than {MAX_SECONDS:g} s")


def _check_repetition(sequence: Any, count: Any) -> None:
    if isinstance(sequence, str | list | tuple) and isinstance(count, int):
        _check_length(len(sequence) * count)


def _check_length(length: int) -> None:
    if length > MAX_RENDERED_CHARACTERS:
        raise jinja2.exceptions.SecurityError(f"a value of more than {MAX_RENDERED_CHARACTERS} characters")


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscore names, and with bounded strings."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} begins with an underscore")
        if isinstance(value, str):
            _check_length(len(value))
        super().__setitem__(name, value)


def _environment() -> _BoundedEnvironment:
    environment = _BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
    }
    environment.globals.update(helpers)
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain(value: Any) -> Any:
    """The value rebuilt from exact JSON types, so that the template holds no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    raise InvalidRequestError(
        f"a chat message holds a {type(value).__name__}; only JSON values are possible", "messages"
    )


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """One message without its null fields; a `reasoning` field is also known as `reasoning_content`."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"a message must be an object, not {type(message).__name__}", "messages")
    plain: dict[str, Any] = {key: value for key, value in _plain(message).items() if value is not None}
    if "reasoning" in plain:
        plain.setdefault("reasoning_content", plain["reasoning"])
    return plain


def _mark_end(message: dict[str, Any]) -> None:
    """Appends the mark and a space to the message's text; a template that trims drops the space."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_MARK + " "
        return
    parts = [part for part in content or [] if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not parts:
        raise InvalidRequestError("continue_final_message needs text in the final message", "messages")
    parts[-1]["text"] += _CONTINUE_MARK + " "


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE_MARK)
    if at < 0:
        raise InvalidRequestError(
            "the chat template leaves out the final message, so it cannot be continued", "messages"
        )
    trimmed = not text.startswith(" ", at + len(_CONTINUE_MARK))
    return text[:at].rstrip() if trimmed else text[:at]
