"""The front end's side of the engine's process: start it, stream from it, notice its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from sonar_engine import engine_messages as messages
from sonar_engine.config import EngineConfig
from sonar_engine.engine_connection import EngineConnection, Launcher, launch_process
from sonar_engine.engine_process import DEFAULT_FACTORY
from sonar_engine.errors import EngineDeadError, SonarError
from sonar_engine.events import OutputCollector
from sonar_engine.output_stream import OutputStream
from sonar_engine.types import EngineInfo, EngineStats, RequestMetrics, RequestOutput, SamplingParams

CALL_TIMEOUT = 30.0  # seconds
OnProgress = Callable[[str, int, int], None]  # (stage, done, total)


class EngineClient:
    """One engine in a process of its own. All methods belong to one event loop.

    `probe_timeout` is how long a health probe waits; an engine that owes somebody an answer and stays silent for
    `hang_timeout` seconds is declared dead and ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        factory: str = DEFAULT_FACTORY,
        launch: Launcher = launch_process,
        probe_timeout: float = 4.0,
        hang_timeout: float = 60.0,
    ) -> None:
        self.config = config
        self.probe_timeout = probe_timeout
        self.hang_timeout = hang_timeout
        self.on_step: Callable[[int], None] | None = None  # called with each step's number of new tokens
        self._factory = factory
        self._launch = launch
        self._ids = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages.ToFrontEnd)
        self._info: EngineInfo | None = None
        self._loaded = False
        self._stats: EngineStats | None = None
        self._connection: EngineConnection | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._collector = OutputCollector()
        self._streams: dict[int, OutputStream] = {}  # by request id
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._probe: asyncio.Future[None] | None = None
        self._on_progress: OnProgress | None = None
        self._death: SonarError | None = EngineDeadError("the engine has not been started")
        self._died = asyncio.Event()
        self._heard_at = 0.0

    # Life

    async def start(self, on_progress: OnProgress | None = None) -> EngineInfo:
        """Start the process and wait until the model is loaded; may be called again after a death.

        Raises what loading raised (ConfigError, ModelLoadError) or EngineDeadError.
        """
        await self._end_process()
        self._on_progress = on_progress
        self._collector = OutputCollector()
        self._death, self._died, self._loaded = None, asyncio.Event(), False
        self._connection = await EngineConnection.open(self._launch, self._factory)
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = loop.create_future()
        self._calls[0] = ready
        self._tasks = [loop.create_task(self._receive()), loop.create_task(self._watch_process())]
        self._send(messages.Configure(self.config.model_dump_json()))
        try:
            self._info = await ready
            self._loaded = True
        except BaseException:
            await self._end_process()
            raise
        self._tasks.append(loop.create_task(self._watch_silence()))
        return self._info

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine is not loaded yet")
        return self._info

    @property
    def alive(self) -> bool:
        """Loaded, and its process neither ended nor found to hang."""
        return self._death is None and self._loaded

    @property
    def pid(self) -> int | None:
        return None if self._connection is None else self._connection.handle.pid

    async def wait_dead(self) -> SonarError:
        """Returns, with the cause, when the engine dies without having been told to."""
        await self._died.wait()
        return self._death or EngineDeadError("the engine's process ended")

    async def shutdown(self, timeout: float = 5.0) -> None:
        """End the engine; open streams get EngineDeadError. Kills it when it takes longer than `timeout` seconds."""
        connection = self._connection
        if connection is None:
            return
        if self._death is None:
            self._send(messages.Shutdown())
            self._fail_all(EngineDeadError("the engine was shut down"))
            self._death = EngineDeadError("the engine was shut down")
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(connection.handle.wait(), timeout)
        await self._end_process()

    def abandon(self) -> None:
        """Kill the engine and remove its socket without waiting, before this process ends at once."""
        if self._connection is not None:
            self._connection.abandon()

    async def _end_process(self) -> None:
        connection, self._connection = self._connection, None
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        if connection is not None:
            await connection.close()

    # Requests

    async def open(self, sequences: Sequence[tuple[Sequence[int] | np.ndarray, SamplingParams]]) -> OutputStream:
        """Submit sequences (prompt ids, parameters) that succeed or fail together.

        Returns once the engine has accepted them. Raises InvalidRequestError, QueueFullError or EngineDeadError.
        """
        self._check_alive()
        self._expect_answer()
        ids = tuple(next(self._ids) for _ in sequences)
        stream = OutputStream(ids, self._abort)
        now = time.monotonic()
        batch = []
        for request_id, (prompt, params) in zip(ids, sequences, strict=True):
            self._collector.add(request_id, params, now)
            self._streams[request_id] = stream
            batch.append(messages.Sequence(request_id, np.asarray(prompt, np.int32).tobytes(), params))
        try:
            await self._call(lambda call_id: messages.Submit(call_id, batch))
        except BaseException:
            stream.close()
            raise
        return stream

    async def stream(
        self, prompt_ids: Sequence[int] | np.ndarray, params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        """New tokens of one sequence as they come; closing the iterator aborts the request."""
        stream = await self.open([(prompt_ids, params)])
        try:
            while not stream.finished:
                for output in await stream.wait():
                    yield output
        finally:
            stream.close()

    def metrics(self, request_id: int) -> RequestMetrics | None:
        """What an open request has cost until now, in the engine's clock."""
        return self._collector.metrics(request_id)

    def request_abort(self, stream: OutputStream) -> None:
        """Ask the engine to end a stream's sequences; their reader still gets what they said and the end."""
        self._send(messages.Abort(list(stream.request_ids)))

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    def _abort(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
            self._collector.discard(request_id)
        if self._death is None and self._connection is not None:
            self._send(messages.Abort(request_ids))

    # Questions

    async def stats(self, timeout: float = CALL_TIMEOUT) -> EngineStats:
        self._check_alive()
        stats: EngineStats = await asyncio.wait_for(self._call(messages.GetStats), timeout)
        self._stats = stats
        return stats

    @property
    def last_stats(self) -> EngineStats | None:
        """The newest answer of `stats`."""
        return self._stats

    async def reset_prefix_cache(self, timeout: float = CALL_TIMEOUT) -> bool:
        self._check_alive()
        return bool(await asyncio.wait_for(self._call(messages.ResetPrefixCache), timeout))

    async def probe(self, timeout: float | None = None) -> None:
        """Returns once a step has run. Raises EngineDeadError when none does within `timeout` seconds."""
        self._check_alive()
        if self._probe is None:
            self._probe = asyncio.ensure_future(self._call(messages.Probe))
            self._probe.add_done_callback(self._forget_probe)
        limit = self.probe_timeout if timeout is None else timeout
        try:
            await asyncio.wait_for(asyncio.shield(self._probe), limit)
        except TimeoutError:
            raise EngineDeadError(f"the engine has run no step for {limit:g} seconds") from None

    def _forget_probe(self, probe: asyncio.Future[None]) -> None:
        self._probe = None
        if not probe.cancelled():
            probe.exception()  # whoever waited has seen it

    async def _call(self, message: Callable[[int], messages.ToEngine]) -> Any:
        self._expect_answer()
        call_id = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(message(call_id))
            return await future
        finally:
            self._calls.pop(call_id, None)

    def _owed(self) -> bool:
        return bool(self._calls or self._streams)

    def _expect_answer(self) -> None:
        """Silence counts from here when the engine owed nobody anything until now."""
        if not self._owed():
            self._heard_at = time.monotonic()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        if not self._loaded:
            raise EngineDeadError("the engine is still loading")

    # The wire

    def _send(self, message: messages.ToEngine) -> None:
        if self._connection is not None:
            self._connection.socket.send(self._encoder.encode(message))

    async def _receive(self) -> None:
        connection = self._connection
        try:
            while connection is not None:
                self._handle(self._decoder.decode(await connection.socket.recv()))
                self._heard_at = time.monotonic()
        except Exception as error:
            self._die(EngineDeadError(f"the engine cannot be understood: {type(error).__name__}: {error}"))
            raise

    def _handle(self, message: messages.ToFrontEnd) -> None:
        match message:
            case messages.Events():
                self._deliver(message)
            case messages.Accepted() | messages.ProbeReply():
                self._answer(message.call_id, None)
            case messages.Rejected():
                self._answer(message.call_id, message.error.to_error())
            case messages.StatsReply():
                self._answer(message.call_id, message.stats)
            case messages.PrefixCacheReset():
                self._answer(message.call_id, message.done)
            case messages.Progress():
                if self._on_progress is not None:
                    self._on_progress(message.stage, message.done, message.total)
            case messages.Ready():
                self._answer(0, message.info)
            case messages.Fatal():
                self._die(message.error.to_error())

    def _deliver(self, message: messages.Events) -> None:
        events = message.events
        for output in self._collector.feed(events):
            if output.finish_reason is None:
                stream = self._streams.get(output.request_id)
            else:
                stream = self._streams.pop(output.request_id, None)
            if stream is not None:
                stream.deliver(output)
        if self.on_step is not None:
            self.on_step(len(events.tokens) // 4)

    def _answer(self, call_id: int, answer: object) -> None:
        future = self._calls.pop(call_id, None)
        if future is None or future.done():
            return
        if isinstance(answer, SonarError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    # Death

    async def _watch_process(self) -> None:
        connection = self._connection
        if connection is None:
            return
        code = await connection.handle.wait()
        await asyncio.sleep(0.05)  # a last message may be on its way
        self._die(EngineDeadError(f"the engine's process ended unexpectedly (exit code {code})"))

    async def _watch_silence(self) -> None:
        """A probe goes out at half of the allowed silence: an engine that steps without events answers it."""
        while True:
            await asyncio.sleep(self.hang_timeout / 8)
            silence = time.monotonic() - self._heard_at
            if not self._owed():
                continue
            if silence > self.hang_timeout:
                self._die(EngineDeadError(f"the engine has run no step for {silence:.0f} seconds"))
            elif silence > self.hang_timeout / 2 and self._probe is None:
                self._probe = asyncio.ensure_future(self._call(messages.Probe))
                self._probe.add_done_callback(self._forget_probe)

    def _die(self, error: SonarError) -> None:
        if self._death is not None:
            return
        self._death = error
        if self._connection is not None:
            self._connection.kill()
        self._fail_all(error)
        self._died.set()

    def _fail_all(self, error: SonarError) -> None:
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(error)
        streams, self._streams = self._streams, {}
        for stream in set(streams.values()):
            stream.fail(EngineDeadError(str(error)))
