"""The page at `/`: its files, which hold no secret and need no key, and the numbers it draws, which need one."""

from __future__ import annotations

import contextlib
import time
from importlib import resources
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from sonar_engine.errors import EngineDeadError
from sonar_engine.server.state import ServerState

# path -> file of the folder `page`, media type
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/page/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def refresh_stats(state: ServerState) -> None:
    """Asks a living engine for its statistics; when it does not answer in time the last ones stay."""
    if state.client.alive:
        with contextlib.suppress(EngineDeadError, TimeoutError):
            await state.client.stats(timeout=state.config.probe_timeout)


def page_routes(state: ServerState) -> APIRouter:
    """The page and `/dashboard/data`, which it asks once a second."""
    router = APIRouter()
    for path, (name, media_type) in PAGE_FILES.items():
        _add_file(router, path, name, media_type)

    @router.get("/dashboard/data")
    async def dashboard_data() -> Response:
        """Counters since the engine's start and gauges of now; `stats` is null without an engine."""
        await refresh_stats(state)
        return Response(msgspec.json.encode(_data(state)), media_type="application/json")

    return router


def _add_file(router: APIRouter, path: str, name: str, media_type: str) -> None:
    content = resources.files("sonar_engine.server").joinpath("page", name).read_bytes()

    async def page_file() -> Response:
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)

    router.add_api_route(path, page_file, methods=["GET", "HEAD"], include_in_schema=False)


def _data(state: ServerState) -> dict[str, Any]:
    alive = state.client.alive
    return {
        "time": time.monotonic(),
        "phase": state.phase,
        "model": state.model_name if alive else None,
        "drafter": state.info.drafter if alive else "none",
        "num_speculative_tokens": state.info.num_speculative_tokens if alive else 0,
        "stats": state.client.last_stats if alive else None,
    }
