"""`response_format` and `structured_outputs` as the form that the engine follows."""

from __future__ import annotations

import json
from typing import Any

from sonar_engine.errors import InvalidRequestError
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.protocol import GenerationRequest, ResponseFormat, StructuredOutputs
from sonar_engine.types import StructuredOutput


def structured_output(request: GenerationRequest, limits: ServerConfig) -> StructuredOutput | None:
    """The form that the request asks for, if any. Raises InvalidRequestError naming the field."""
    field, form = "response_format", _of_response_format(request.response_format, limits)
    if request.structured_outputs is not None:
        if form is not None:
            raise InvalidRequestError("give response_format or structured_outputs, not both", "structured_outputs")
        field, form = "structured_outputs", _of_structured_outputs(request.structured_outputs, limits)
    if form is not None:
        size = len(form.content.encode(errors="replace"))
        if size > limits.max_schema_bytes:
            raise InvalidRequestError(
                f"{field} has {size} bytes; at most {limits.max_schema_bytes} are possible", field
            )
    return form


def in_terms_of(request: GenerationRequest, error: InvalidRequestError) -> InvalidRequestError:
    """The engine's error about a form, with the field of the request that asked for it."""
    if error.param != "structured":
        return error
    field = "response_format" if request.structured_outputs is None else "structured_outputs"
    return InvalidRequestError(f"{field}: {error}", field, error.code)


def _of_response_format(asked: ResponseFormat | None, limits: ServerConfig) -> StructuredOutput | None:
    field = "response_format"
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return StructuredOutput(kind="json_object")
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise InvalidRequestError("response_format of type json_schema needs json_schema.schema", field)
    return _json_schema(asked.json_schema.schema_, field, limits)


def _of_structured_outputs(asked: StructuredOutputs, limits: ServerConfig) -> StructuredOutput:
    field = "structured_outputs"
    given = {name: value for name, value in asked if value is not None and value is not False}
    if len(given) != 1:
        raise InvalidRequestError(
            f"structured_outputs needs one of json, json_object, regex, choice, grammar; it has {len(given)}", field
        )
    ((name, value),) = given.items()
    match name:
        case "json_":
            return _json_schema(value, field, limits)
        case "json_object":
            return StructuredOutput(kind="json_object")
        case "choice":
            return StructuredOutput(kind="choice", content=json.dumps(value, ensure_ascii=False))
        case "regex":
            return StructuredOutput(kind="regex", content=value)
        case _:
            return StructuredOutput(kind="grammar", content=value)


def _json_schema(schema: Any, field: str, limits: ServerConfig) -> StructuredOutput:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{field}: the schema is not valid JSON: {error}", field) from None
    if _depth(schema, limits.max_schema_depth) > limits.max_schema_depth:
        raise InvalidRequestError(
            f"{field}: the schema is nested more than {limits.max_schema_depth} deep; flatten it or use $defs", field
        )
    return StructuredOutput(kind="json_schema", content=json.dumps(schema, ensure_ascii=False))


def _depth(value: Any, most: int) -> int:
    """Levels of objects and lists; counting ends above `most`."""
    depth, level = 0, [value]
    while level and depth <= most:
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
            if isinstance(child, dict | list)
        ]
        depth += 1
    return depth
