"""The routes: each parses, checks, and hands over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from sonar_engine.errors import EngineDeadError, InvalidRequestError
from sonar_engine.server.answer import Answer
from sonar_engine.server.chat import prepare_chat
from sonar_engine.server.completions import prepare_completion
from sonar_engine.server.dashboard import refresh_stats
from sonar_engine.server.errors import ApiError
from sonar_engine.server.guard import read_body
from sonar_engine.server.prompts import chat_prompt, check_ids, check_text, off_loop
from sonar_engine.server.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
    reject_unsupported,
)
from sonar_engine.server.request_record import MAX_ID_LEN, RequestRecord, is_id, record_of
from sonar_engine.server.state import ServerState
from sonar_engine.server.streaming import EventStream, unless_gone
from sonar_engine.server.structured import in_terms_of
from sonar_engine.tokenizer import Tokenizer

Prepare = Callable[[Any, ServerState, Tokenizer], Awaitable[Answer]]


def json_response(value: Any) -> Response:
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return Response(body, media_type="application/json")


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The request body for the OpenAPI document, which knows no `$defs`: they are put in place."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inlined(definitions[node["$ref"].rpartition("/")[2]])
        return {key: inlined(value) for key, value in node.items()}

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}


def generation_routes(state: ServerState) -> APIRouter:
    """Chat and text completions."""
    router = APIRouter()

    async def respond(request: Request, model: type[GenerationRequest], prepare: Prepare) -> Response:
        tokenizer = state.ready_tokenizer()
        asked = parse(model, await read_body(request, state.config.max_body_bytes), state.config.max_messages)
        state.check_model(asked.model)
        reject_unsupported(asked)
        _take_id(asked, record_of(request.scope))
        try:
            answer = await prepare(asked, state, tokenizer)
            return await _answered(answer, request, state, stream=bool(asked.stream))
        except InvalidRequestError as error:
            raise in_terms_of(asked, error) from None

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await respond(request, ChatRequest, prepare_chat)

    @router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await respond(request, CompletionRequest, prepare_completion)

    return router


async def _answered(answer: Answer, request: Request, state: ServerState, stream: bool) -> Response:
    """Runs the generation; whatever happens here or later, it is closed."""
    generation = record_of(request.scope).generation = answer.generation
    handed_over = False
    try:
        await unless_gone(generation.open(), request.receive)
        if stream:
            handed_over = True
            return EventStream(generation, answer, state.config.ping_interval)
        return json_response(await unless_gone(answer.whole(), request.receive))
    finally:
        if not handed_over:
            generation.close()


def _take_id(asked: GenerationRequest, record: RequestRecord) -> None:
    own = asked.request_id
    if own is None:
        return
    if not is_id(own):
        raise InvalidRequestError(
            f"request_id must be 1 to {MAX_ID_LEN} printable ASCII characters", param="request_id"
        )
    record.name(own)


def text_routes(state: ServerState) -> APIRouter:
    """Models, tokenising, detokenising."""
    router = APIRouter()

    def model_card() -> dict[str, Any]:
        return {
            "id": state.model_name,
            "object": "model",
            "created": state.created,
            "owned_by": "sonar",
            "root": state.info.model_name,
            "max_model_len": state.info.max_model_len,
            "drafter": state.info.drafter,
            "num_speculative_tokens": state.info.num_speculative_tokens,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        state.ready_tokenizer()
        return json_response({"object": "list", "data": [model_card()]})

    @router.get("/v1/models/{model_id:path}")
    async def model(request: Request) -> Response:
        state.ready_tokenizer()
        state.check_model(request.path_params["model_id"])
        return json_response(model_card())

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        tokenizer = state.ready_tokenizer()
        body = await read_body(request, state.config.max_body_bytes)
        asked = parse(TokenizeRequest, body, state.config.max_messages)
        state.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        if asked.prompt is None:
            ids = await chat_prompt(asked, tokenizer, state.config.max_prompt_chars)
        else:
            text, special = asked.prompt, asked.add_special_tokens is not False
            check_text(text, tokenizer, state.info, state.config.max_prompt_chars)
            ids = await off_loop(lambda: tokenizer.encode(text, special), len(text))
        strings = [tokenizer.raw.id_to_token(token_id) for token_id in ids] if asked.return_token_strs else None
        return json_response(
            {"count": len(ids), "max_model_len": state.info.max_model_len, "tokens": ids, "token_strs": strings}
        )

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        tokenizer = state.ready_tokenizer()
        asked = parse(DetokenizeRequest, await read_body(request, state.config.max_body_bytes))
        state.check_model(asked.model)
        check_ids(asked.tokens, state.info, "tokens")
        skip = bool(asked.skip_special_tokens)
        text = await off_loop(lambda: tokenizer.decode(asked.tokens, skip_special_tokens=skip), len(asked.tokens))
        return json_response({"prompt": text})

    return router


def service_routes(state: ServerState, version: str) -> APIRouter:
    """What operators and orchestrators ask."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """200 only when the engine has just run a step."""
        if state.phase == "loading":
            raise ApiError(503, "the model is still loading", code="loading")
        try:
            await state.client.probe()
        except EngineDeadError as error:
            raise ApiError(503, str(error), code="engine_dead") from error
        return json_response({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        state.ready_tokenizer()
        return json_response({"status": "ready"})

    @router.get("/metrics")
    async def metrics() -> Response:
        await refresh_stats(state)
        info = state.client.info if state.client.alive else None
        return Response(
            state.metrics.render(info, state.client.last_stats), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @router.get("/version")
    async def show_version() -> Response:
        return json_response({"version": version})

    @router.get("/load")
    async def load() -> Response:
        return json_response(
            {"server_load": len(state.responses), "num_open_sequences": state.client.num_open_requests}
        )

    return router


def admin_routes(state: ServerState) -> APIRouter:
    """Behind the admin key."""
    router = APIRouter()

    @router.post("/abort", openapi_extra=body_schema(AbortRequest))
    async def abort(request: Request) -> Response:
        asked = parse(AbortRequest, await read_body(request, state.config.max_body_bytes))
        stream = state.responses.get(asked.request_id)
        if stream is None:
            raise ApiError(404, "no response with exactly this id is running", param="request_id")
        state.client.request_abort(stream)
        return json_response({"id": asked.request_id, "aborted": True})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        state.ready_tokenizer()
        return json_response({"done": await state.client.reset_prefix_cache()})

    return router
