"""The engine's own process: one loop that steps the engine and, between steps, takes messages from its socket.

Nothing else runs Python here for long: a busy thread beside the loop would fight torch's threads for the processor.
Run as `python -m sonar_engine.engine_process --endpoint ipc://... --parent PID`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol, get_args

import msgspec
import numpy as np
import zmq

from sonar_engine import engine_messages as messages
from sonar_engine.config import EngineConfig
from sonar_engine.errors import ConfigError, InvalidRequestError, SonarError
from sonar_engine.events import StepEvents
from sonar_engine.logs import LogFormat, configure_logging
from sonar_engine.prepared_submits import PreparedSubmits
from sonar_engine.types import EngineInfo, EngineStats, SamplingParams, StructuredOutput

DEFAULT_FACTORY = "sonar_engine.engine:build_engine"
PARENT_CHECK_MS = 1000
PREPARING_POLL = 0.002  # seconds between looks at what is being prepared, where nothing runs
PR_SET_PDEATHSIG = 1

logger = logging.getLogger("sonar_engine.engine_process")


class SteppedEngine(Protocol):
    """What the loop needs of an engine; `sonar_engine.engine.Engine` is one."""

    @property
    def info(self) -> EngineInfo: ...
    def submit(self, request_id: int, prompt: np.ndarray, params: SamplingParams) -> None: ...
    def prepare(self, form: StructuredOutput) -> None: ...
    def abort(self, request_id: int) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> StepEvents | None: ...
    def stats(self) -> EngineStats: ...
    def reset_prefix_cache(self) -> bool: ...
    def probe(self) -> None: ...
    def close(self) -> None: ...


EngineFactory = Callable[[EngineConfig, Callable[[str, int, int], None]], SteppedEngine]


class FrontEndGoneError(SonarError):
    """The process that started this engine has ended."""


class Link:
    """The engine's end of the socket."""

    def __init__(self, socket: zmq.Socket[bytes], front_end_lives: Callable[[], bool]) -> None:
        self._socket = socket
        self._front_end_lives = front_end_lives
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages.ToEngine)

    def send(self, message: messages.ToFrontEnd) -> None:
        self._socket.send(self._encoder.encode(message), copy=True)

    def wait(self, seconds: float) -> None:
        """Until a message is here, or `seconds` have passed."""
        self._socket.poll(int(seconds * 1000))

    def receive(self) -> messages.ToEngine:
        """The next message; blocks without using the processor."""
        while not self._socket.poll(PARENT_CHECK_MS):
            if not self._front_end_lives():
                raise FrontEndGoneError("the front end has ended")
        return self._decoder.decode(self._socket.recv())

    def receive_ready(self) -> messages.ToEngine | None:
        """The next message that is already here."""
        try:
            return self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None


class EngineLoop:
    """Steps one engine and serves one link until told to shut down."""

    def __init__(self, engine: SteppedEngine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._probes: list[int] = []  # answered after the next step
        self._preparing = PreparedSubmits(engine.prepare)
        self._running = True

    def run(self) -> None:
        while self._running:
            if not self._engine.has_work() and not self._probes:
                if self._preparing:
                    self._link.wait(PREPARING_POLL)
                else:
                    self._handle(self._link.receive())
            for submit, refusal in self._preparing.take_done():
                self._submit(submit, refusal)
            while (message := self._link.receive_ready()) is not None:
                self._handle(message)
            self._advance()

    def _advance(self) -> None:
        if not self._running:
            return
        if self._engine.has_work():
            events = self._engine.step()
            if events is not None and (events.request_ids or events.admitted_ids):
                self._link.send(messages.Events(events))
        elif self._probes:
            self._engine.probe()
        for call_id in self._probes:
            self._link.send(messages.ProbeReply(call_id))
        self._probes.clear()

    def _handle(self, message: messages.ToEngine) -> None:
        match message:
            case messages.Submit():
                if not self._preparing.add(message):
                    self._submit(message)
            case messages.Abort():
                self._preparing.drop(message.request_ids)
                for request_id in message.request_ids:
                    self._engine.abort(request_id)
            case messages.Probe():
                self._probes.append(message.call_id)
            case messages.GetStats():
                self._link.send(messages.StatsReply(message.call_id, self._engine.stats()))
            case messages.ResetPrefixCache():
                self._link.send(messages.PrefixCacheReset(message.call_id, self._engine.reset_prefix_cache()))
            case messages.Shutdown():
                self._running = False
            case messages.Configure():
                raise ConfigError("the engine is configured already; start another process for another configuration")

    def _submit(self, message: messages.Submit, refusal: BaseException | None = None) -> None:
        """All of the message's sequences, or none: those before a rejected one are aborted."""
        done: list[int] = []
        try:
            if refusal is not None:
                raise refusal
            for sequence in message.sequences:
                prompt = np.frombuffer(sequence.prompt, np.int32)
                self._engine.submit(sequence.request_id, prompt, sequence.params)
                done.append(sequence.request_id)
        except Exception as error:
            for request_id in done:
                self._engine.abort(request_id)
            if not isinstance(error, SonarError):  # a bad request must fail only itself
                logger.error("a request failed in the engine", exc_info=error)
                error = InvalidRequestError(f"the request cannot be served: {error}")
            self._link.send(messages.Rejected(message.call_id, messages.ErrorReport.of(error)))
        else:
            self._link.send(messages.Accepted(message.call_id))


def serve(endpoint: str, factory: EngineFactory, front_end_lives: Callable[[], bool]) -> int:
    """Connect to `endpoint`, build the engine it asks for and run it; the exit code."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 1000)  # lets the last message out
        socket.connect(endpoint)
        link = Link(socket, front_end_lives)
        try:
            engine = _build(link, factory)
            if engine is None:
                return 0
            try:
                EngineLoop(engine, link).run()
            finally:
                engine.close()
        except FrontEndGoneError:
            return 1
        except Exception as error:
            if not isinstance(error, SonarError):
                logger.error("the engine failed", exc_info=error)
            link.send(messages.Fatal(messages.ErrorReport.of(error)))
            return 1
    return 0


def _build(link: Link, factory: EngineFactory) -> SteppedEngine | None:
    """The engine of the link's first message; None when that is a shutdown."""
    first = link.receive()
    if isinstance(first, messages.Shutdown):
        return None
    if not isinstance(first, messages.Configure):
        raise ConfigError(f"the first message must be Configure, not {type(first).__name__}")
    config = EngineConfig.model_validate_json(first.config)
    engine = factory(config, lambda stage, done, total: link.send(messages.Progress(stage, done, total)))
    engine.probe()  # the first step is slow, and a model that cannot run one is not ready
    gc.collect()
    gc.freeze()  # what loading made lives as long as the process
    link.send(messages.Ready(engine.info))
    return engine


def load_factory(spec: str) -> EngineFactory:
    """`module:function` as the function."""
    module, _, name = spec.partition(":")
    factory: EngineFactory = getattr(importlib.import_module(module), name)
    return factory


def die_with_parent(parent: int) -> None:
    """Ask the kernel (Linux) to end this process when the front end does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"the front end (process {parent}) has ended")


def main() -> int:
    # The front end alone answers signals sent to the whole group (a terminal's ctrl-c, a service manager's stop).
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m sonar_engine.engine_process")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--factory", default=DEFAULT_FACTORY)
    parser.add_argument("--log-format", choices=get_args(LogFormat), default="text")
    arguments = parser.parse_args()
    configure_logging(arguments.log_format)
    die_with_parent(arguments.parent)
    try:
        factory = load_factory(arguments.factory)
    except Exception as error:
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.connect(arguments.endpoint)
            Link(socket, lambda: True).send(messages.Fatal(messages.ErrorReport.of(error)))
        raise
    return serve(arguments.endpoint, factory, lambda: os.getppid() == arguments.parent)


if __name__ == "__main__":
    sys.exit(main())
