"""`sonar serve`: load, listen, watch the engine, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Generator

import uvicorn

from sonar_engine.config import EngineConfig
from sonar_engine.drafters.shipped import shipped_line
from sonar_engine.engine_client import EngineClient
from sonar_engine.engine_process import DEFAULT_FACTORY
from sonar_engine.errors import ConfigError, EngineDeadError, SonarError
from sonar_engine.logs import configure_logging
from sonar_engine.server.app import app_of, package_version
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.engine_log import LaunchLogged
from sonar_engine.server.startup import StatsLine, model_lines, options_line
from sonar_engine.server.state import ServerState
from sonar_engine.server.tls import tls_context
from sonar_engine.tokenizer import Tokenizer, load_tokenizer

LoadTokenizer = Callable[[EngineConfig], Tokenizer]
ABORT_GRACE = 2.0  # seconds for the error events of requests that are given up
MAX_RESTARTS = 5  # in a row, without a healthy minute between

logger = logging.getLogger("sonar_engine.server")


def tokenizer_of(config: EngineConfig) -> Tokenizer:
    """The tokenizer of the configured model."""
    from sonar_engine.models.registry import resolve_model

    return load_tokenizer(resolve_model(config.tokenizer or config.model))


def run_server(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    factory: str = DEFAULT_FACTORY,
    tokenizer_loader: LoadTokenizer = tokenizer_of,
) -> int:
    """Serve until a signal or the engine's end; the exit code. 0 after a drain.

    Raises ConfigError when the address cannot be listened on. `factory` and `tokenizer_loader` stand for the model.
    """
    configure_logging(server_config.log_format)
    return asyncio.run(_Run(engine_config, server_config, factory, tokenizer_loader).run())


class _QuietServer(uvicorn.Server):
    """Leaves signals to the caller: a drain keeps answering, with 503, until nothing runs."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Run:
    """One life of the server."""

    def __init__(
        self, engine_config: EngineConfig, server_config: ServerConfig, factory: str, tokenizer_loader: LoadTokenizer
    ) -> None:
        self._engine_config = engine_config
        self._config = server_config
        self._tokenizer_loader = tokenizer_loader
        self._client = EngineClient(
            engine_config,
            factory,
            LaunchLogged(server_config.log_format),
            probe_timeout=server_config.probe_timeout,
            hang_timeout=server_config.engine_hang_timeout,
        )
        self._state = ServerState(self._client, server_config)
        self._client.on_step = self._state.metrics.iteration_tokens.observe
        self._stopping = asyncio.Event()
        self._started_at = time.monotonic()

    async def run(self) -> int:
        tls = tls_context(self._config)
        listener = listen(self._config.host, self._config.port)
        self._watch_signals()
        logger.info("Sonar Engine %s", package_version())
        logger.info(options_line(self._engine_config, self._config))
        if (drafter := shipped_line(self._engine_config)) is not None:
            logger.info(drafter)
        server = _QuietServer(self._uvicorn_config(tls))
        serving = asyncio.create_task(server.serve([listener]))
        try:
            code = await self._live(listener)
        finally:
            await self._client.shutdown()
            server.should_exit = True
            await serving
        return code

    def _uvicorn_config(self, tls: ssl.SSLContext | None) -> uvicorn.Config:
        config = uvicorn.Config(
            app_of(self._state),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            h11_max_incomplete_event_size=self._config.max_header_bytes,
            timeout_graceful_shutdown=3,
            backlog=2048,
        )
        config.load()
        config.ssl = tls
        return config

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._stopping.is_set():
            logger.warning("a second signal: ending at once")
            self._client.abandon()
            os._exit(128 + number)
        logger.info("shutting down: requests that run may finish within %g s", self._config.shutdown_timeout)
        self._state.phase = "draining"
        self._stopping.set()

    async def _live(self, listener: socket.socket) -> int:
        """From loading to the end of the drain, or of the engine."""
        stopping = asyncio.create_task(self._stopping.wait())
        running = asyncio.create_task(self._load_and_watch(listener))
        try:
            await asyncio.wait((stopping, running), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            running.cancel()
            await self._drain()
            return 0
        finally:
            for task in (stopping, running):
                task.cancel()
            await asyncio.gather(stopping, running, return_exceptions=True)

    async def _load_and_watch(self, listener: socket.socket) -> int:
        """Loads, then restarts or gives up when the engine dies; the exit code."""
        try:
            await self._load()
        except SonarError as error:
            logger.error("%s", error)
            return 1
        address, port = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        scheme = "http" if self._config.tls_certfile is None else "https"
        logger.info("ready in %.1f s: %s://%s:%d", time.monotonic() - self._started_at, scheme, shown, port)
        log = asyncio.create_task(self._log_statistics())
        try:
            return await self._watch_engine()
        finally:
            log.cancel()

    async def _load(self) -> None:
        from sonar_engine.cli.terminal import progress_bars

        bars = progress_bars() if self._config.log_format == "text" else contextlib.nullcontext()
        with bars as progress:
            tokenizer = asyncio.create_task(asyncio.to_thread(self._tokenizer_loader, self._engine_config))
            try:
                info = await self._client.start(progress)
                self._state.tokenizer = await tokenizer
            finally:
                tokenizer.cancel()
        self._state.default_sampling = info.generation_defaults
        for line in model_lines(info):
            logger.info("%s", line)
        self._state.phase = "ready"

    async def _watch_engine(self) -> int:
        restarts, began = 0, time.monotonic()
        while True:
            error = await self._client.wait_dead()
            logger.error("the engine died: %s", error)
            self._state.phase = "dead"
            restarts = 0 if time.monotonic() - began > 60 else restarts
            if self._config.on_engine_death == "exit" or restarts >= MAX_RESTARTS:
                await self._state.wait_idle(ABORT_GRACE)
                return 1
            restarts += 1
            await asyncio.sleep(min(2 ** (restarts - 1) - 1, 30))
            logger.info("starting the engine again")
            self._state.phase, began = "loading", time.monotonic()
            try:
                await self._client.start()
            except SonarError as failure:
                logger.error("%s", failure)
                return 1
            self._state.phase = "ready"
            logger.info("ready again after %.1f s", time.monotonic() - began)

    async def _drain(self) -> None:
        if not await self._state.wait_idle(self._config.shutdown_timeout):
            logger.warning("giving up %d responses that still run", len(self._state.responses))
            self._state.abort_all()
            await self._state.wait_idle(ABORT_GRACE)
        logger.info("drained")

    async def _log_statistics(self) -> None:
        line = StatsLine()
        while True:
            with contextlib.suppress(EngineDeadError, TimeoutError):
                text = line.next(await self._client.stats(timeout=self._config.stats_interval))
                if text is not None:
                    logger.info("%s", text)
            await asyncio.sleep(self._config.stats_interval)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError when the address is taken or no address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --host and --port"
        ) from error
    return listener
