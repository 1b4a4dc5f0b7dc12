"""The application: routes, the guard before them, and errors in one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from sonar_engine.engine_client import EngineClient
from sonar_engine.errors import SonarError
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.dashboard import page_routes
from sonar_engine.server.errors import ApiError
from sonar_engine.server.guard import Guard, error_response
from sonar_engine.server.routes import admin_routes, generation_routes, service_routes, text_routes
from sonar_engine.server.state import ServerState
from sonar_engine.server.watch import OnEnd, RequestWatch, log_request
from sonar_engine.tokenizer import Tokenizer


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: ServerConfig | None = None,
    default_sampling: Mapping[str, Any] | None = None,
) -> FastAPI:
    """An application over a started client. `default_sampling` are the model's own values for absent fields."""
    state = ServerState(client, config or ServerConfig(), tokenizer, dict(default_sampling or {}), "ready")
    return app_of(state)


def app_of(state: ServerState, on_end: Sequence[OnEnd] = ()) -> FastAPI:
    """An application over a state that may still be loading. `on_end` are told of every request that has ended."""
    version = package_version()
    app = FastAPI(title="Sonar Engine", version=version, docs_url=None, redoc_url=None)
    app.state.sonar = state
    groups = (generation_routes(state), text_routes(state), service_routes(state, version), admin_routes(state))
    for router in (*groups, page_routes(state)):
        app.include_router(router)
    for kind in (ApiError, SonarError):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_layers(app, state, on_end)
    return app


def _add_layers(app: FastAPI, state: ServerState, on_end: Sequence[OnEnd]) -> None:
    """From the innermost. A browser's preflight bears no key, and must read what the guard answers."""
    config = state.config
    app.add_middleware(Guard, state=state)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestWatch, on_end=[*on_end, *([log_request] if config.log_requests else [])])


def package_version() -> str:
    from sonar_engine import __version__

    return __version__


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Routing's own errors: no such path, wrong method."""
    if not isinstance(error, HTTPException):
        raise error
    path = request.url.path[:200]
    message = {
        404: f"{path} does not exist",
        405: f"{path} does not take {request.method}",
    }.get(error.status_code, str(error.detail))
    shown = ApiError(error.status_code, message, headers=dict(error.headers or {}))
    return error_response(shown, request.scope)
