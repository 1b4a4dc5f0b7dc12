"""What the routes share: the engine, the tokenizer, and where the server stands in its life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sonar_engine.engine_client import EngineClient
from sonar_engine.output_stream import OutputStream
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.errors import ApiError, ServerStoppingError
from sonar_engine.server.metrics import ServerMetrics
from sonar_engine.tokenizer import Tokenizer
from sonar_engine.types import EngineInfo

Phase = Literal["loading", "ready", "draining", "dead"]


@dataclass
class ServerState:
    """`tokenizer` is None until it is loaded. `responses` holds what runs, by the response's id."""

    client: EngineClient
    config: ServerConfig
    tokenizer: Tokenizer | None = None
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    phase: Phase = "loading"
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    responses: dict[str, OutputStream] = field(default_factory=dict)
    num_in_flight: int = 0  # requests being served, generating or not
    num_queued_tokens: int = 0  # prompt tokens of sequences without a first token
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.info.model_name

    def ready_tokenizer(self) -> Tokenizer:
        """Raises the 503 of a server that is loading, draining or without its engine."""
        match self.phase:
            case "loading":
                raise ApiError(503, "the model is still loading; try again soon", code="loading")
            case "draining":
                raise ApiError(503, "the server is shutting down; send requests elsewhere", code="server_stopping")
            case "dead":
                raise ApiError(503, "the engine has died; the server is about to end or restart it", code="engine_dead")
        if self.tokenizer is None or not self.client.alive:
            raise ApiError(503, "the engine has died; the server is about to end or restart it", code="engine_dead")
        return self.tokenizer

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def check_queue(self, num_tokens: int) -> None:
        """Raises the 429 of a queue that has no room for `num_tokens` more prompt tokens."""
        limit, waiting = self.config.max_queued_tokens, self.num_queued_tokens
        if waiting and waiting + num_tokens > limit:
            raise ApiError(
                429, f"{waiting} prompt tokens are waiting; {num_tokens} more exceed {limit}", code="queue_full"
            )

    def abort_all(self) -> None:
        """Give up everything that runs; its clients get an error event."""
        for stream in list(self.responses.values()):
            stream.cancel(ServerStoppingError("the server is shutting down and gave this request up"))

    async def wait_idle(self, timeout: float) -> bool:
        """Whether all requests have ended within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.num_in_flight > 0:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True
