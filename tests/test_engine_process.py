"""The engine in a process of its own: streams, aborts, rejections, and every way in which it can end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from sonar_engine import engine_messages as messages
from sonar_engine.engine_client import EngineClient
from sonar_engine.engine_connection import launch_process, remove_stale_folders
from sonar_engine.engine_process import EngineLoop, load_factory
from sonar_engine.errors import EngineDeadError, InvalidRequestError, ModelLoadError, QueueFullError
from sonar_engine.testing.engine_thread import launch_thread
from sonar_engine.testing.fake_engine import FACTORY, FakeOptions, build_fake_engine
from sonar_engine.types import RequestOutput, SamplingParams

PROMPT = [64, 65, 66]


@asynccontextmanager
async def running(
    options: FakeOptions | None = None, launch: object = launch_thread, hang_timeout: float = 60.0, **config: object
) -> AsyncIterator[EngineClient]:
    client = EngineClient(
        (options or FakeOptions()).config(**config),
        FACTORY,
        launch,
        probe_timeout=1.0,
        hang_timeout=hang_timeout,
    )
    await client.start()
    try:
        yield client
    finally:
        await client.shutdown()


async def collect(client: EngineClient, params: SamplingParams, prompt: list[int] = PROMPT) -> list[RequestOutput]:
    return [output async for output in client.stream(prompt, params)]


async def until(condition: object, seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(0.01)


async def idle(client: EngineClient) -> bool:
    stats = await client.stats()
    return stats.num_running == 0 and stats.num_waiting == 0 and stats.num_free_pages == stats.num_pages


async def test_a_process_streams_tokens_and_ends_with_its_metrics():
    async with running(FakeOptions(tokens_per_step=3), launch_process) as client:
        outputs = await collect(client, SamplingParams(temperature=0.0, max_tokens=8))
        assert client.pid != os.getpid()
        assert client.info.model_name == "fake"
    tokens = [token for output in outputs for token in output.token_ids]
    assert len(tokens) == 8
    assert [len(output.token_ids) for output in outputs] == [1, 3, 3, 1]
    assert [output.finish_reason for output in outputs] == [None, None, None, "length"]
    speculation = outputs[-1].metrics.speculation
    assert (speculation.num_spec_steps, speculation.num_draft_tokens) == (3, 6)
    assert speculation.num_accepted_draft_tokens == 4


async def test_the_same_prompt_gives_the_same_tokens_in_a_thread_and_in_a_process():
    texts = []
    for launch in (launch_thread, launch_process):
        async with running(launch=launch) as client:
            outputs = await collect(client, SamplingParams(temperature=0.0, max_tokens=5))
            texts.append([token for output in outputs for token in output.token_ids])
    assert texts[0] == texts[1]


async def test_concurrent_streams_keep_their_own_tokens():
    async with running(FakeOptions(echo=True)) as client:
        prompts = [[64 + index] * (index + 1) for index in range(20)]
        results = await asyncio.gather(*(collect(client, SamplingParams(), prompt) for prompt in prompts))
        assert await idle(client)
    for prompt, outputs in zip(prompts, results, strict=True):
        assert [token for output in outputs for token in output.token_ids] == [*prompt, 262]
        assert outputs[-1].finish_reason == "stop"


async def test_closing_a_stream_aborts_its_request_in_every_phase():
    async with running(FakeOptions(step_seconds=0.01, prefill_steps=5), max_num_seqs=2) as client:
        tasks = [asyncio.create_task(collect(client, SamplingParams(max_tokens=1000))) for _ in range(6)]
        await asyncio.sleep(0.2)  # two run, four wait
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: idle(client), 1.0)
        assert client.num_open_requests == 0


async def test_a_request_cancelled_before_it_is_accepted_leaves_nothing_behind():
    async with running(FakeOptions(step_seconds=0.05)) as client:
        first = asyncio.create_task(collect(client, SamplingParams(max_tokens=20)))
        await asyncio.sleep(0.06)
        second = asyncio.create_task(client.open([(PROMPT, SamplingParams())]))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await until(lambda: idle(client), 1.0)


async def test_a_rejected_sequence_takes_its_group_with_it_and_nothing_else():
    async with running() as client:
        with pytest.raises(InvalidRequestError, match="empty") as caught:
            await client.open([(PROMPT, SamplingParams()), ([], SamplingParams())])
        assert caught.value.param == "prompt"
        await until(lambda: idle(client), 1.0)
        assert len(await collect(client, SamplingParams(max_tokens=2))) == 2


async def test_a_full_queue_is_its_own_error():
    async with running(FakeOptions(step_seconds=0.01), max_num_seqs=1, max_waiting=1) as client:
        streams = [await client.open([(PROMPT, SamplingParams())])]
        await streams[0].wait()
        streams.append(await client.open([(PROMPT, SamplingParams())]))
        with pytest.raises(QueueFullError):
            await client.open([(PROMPT, SamplingParams())])
        for stream in streams:
            stream.close()
        await until(lambda: idle(client), 1.0)


async def test_giving_up_one_sequence_of_a_group_leaves_the_others_running():
    async with running(FakeOptions(step_seconds=0.005)) as client:
        stream = await client.open([(PROMPT, SamplingParams(max_tokens=20))] * 3)
        first = stream.request_ids[0]
        stream.give_up(first)
        counts = dict.fromkeys(stream.request_ids, 0)
        while not stream.finished:
            for output in await stream.wait():
                counts[output.request_id] += len(output.token_ids)
        assert list(counts.values()) == [0, 20, 20]


async def test_waiting_with_a_timeout_returns_empty_handed():
    async with running(FakeOptions(step_seconds=0.2)) as client:
        stream = await client.open([(PROMPT, SamplingParams(max_tokens=1))])
        assert await stream.wait(0.02) == []
        assert (await stream.wait(5.0))[0].finish_reason == "length"
        stream.close()


async def test_a_killed_engine_ends_every_stream_at_once():
    async with running(FakeOptions(step_seconds=0.01), launch_process) as client:
        tasks = [asyncio.create_task(collect(client, SamplingParams())) for _ in range(4)]
        await asyncio.sleep(0.2)
        killed_at = time.monotonic()
        os.kill(client.pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2.0)
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert time.monotonic() - killed_at < 1.0
        assert isinstance(await client.wait_dead(), EngineDeadError)
        assert not client.alive
        with pytest.raises(EngineDeadError):
            await client.probe()


async def test_a_dead_engine_can_be_started_again():
    async with running(launch=launch_process) as client:
        first = client.pid
        os.kill(first, signal.SIGKILL)
        await client.wait_dead()
        await client.start()
        assert client.alive and client.pid != first
        assert len(await collect(client, SamplingParams(max_tokens=3))) == 3


async def test_an_error_in_a_step_reaches_the_streams_in_words():
    async with running(FakeOptions(fail_after_steps=2)) as client:
        with pytest.raises(EngineDeadError, match="fails as told"):
            await collect(client, SamplingParams())


async def test_a_death_is_told_to_a_reader_that_was_busy_elsewhere():
    async with running(FakeOptions(fail_after_steps=2)) as client:
        stream = await client.open([(PROMPT, SamplingParams())])
        await client.wait_dead()
        assert not stream.finished
        assert len(await stream.wait()) >= 1
        with pytest.raises(EngineDeadError):
            await stream.wait()


async def test_a_hanging_engine_fails_its_probe_and_then_its_streams():
    async with running(FakeOptions(hang_after_steps=3), launch_process, hang_timeout=1.0) as client:
        task = asyncio.create_task(collect(client, SamplingParams()))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineDeadError, match="no step"):
            await client.probe(0.3)
        with pytest.raises(EngineDeadError, match="no step"):
            await asyncio.wait_for(task, 4.0)
        assert not client.alive


async def test_slow_silent_steps_are_not_taken_for_a_hang():
    options = FakeOptions(step_seconds=0.3, prefill_steps=6)
    async with running(options, hang_timeout=1.0) as client:
        outputs = await collect(client, SamplingParams(max_tokens=2))
        assert len(outputs) == 2 and client.alive


async def test_an_idle_engine_proves_itself_by_a_probe_step():
    async with running() as client:
        before = (await client.stats()).num_steps
        await asyncio.gather(*(client.probe() for _ in range(5)))
        assert (await client.stats()).num_steps > before


async def test_a_model_that_cannot_be_loaded_is_reported_as_such():
    client = EngineClient(FakeOptions(load_error="no such folder: give another").config(), FACTORY, launch_process)
    with pytest.raises(ModelLoadError, match="no such folder"):
        await client.start()
    assert client.pid is None


async def test_a_process_that_dies_while_loading_is_noticed():
    client = EngineClient(FakeOptions().config(), "sonar_engine.no_such_module:build", launch_process)
    with pytest.raises(EngineDeadError, match=r"no_such_module|exit code"):
        await client.start()


async def test_loading_reports_progress():
    seen = []
    client = EngineClient(FakeOptions().config(), FACTORY, launch_thread)
    await client.start(lambda stage, done, total: seen.append((stage, done, total)))
    await client.shutdown()
    assert seen == [("weights", 1, 1)]


async def test_shutdown_ends_the_process_and_removes_its_folder():
    async with running(launch=launch_process) as client:
        process = psutil.Process(client.pid)
        folder = client._connection.folder.path
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not process.is_running()
    assert not folder.exists()


async def test_a_terminals_interrupt_does_not_reach_the_engine():
    async with running(launch=launch_process) as client:
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGTERM)
        assert len(await collect(client, SamplingParams(max_tokens=3))) == 3


FRONT_END = """
import asyncio, sys
from sonar_engine.engine_client import EngineClient
from sonar_engine.testing.fake_engine import FACTORY, FakeOptions

async def main():
    client = EngineClient(FakeOptions().config(), FACTORY)
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def front_end(folder: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A process that has started an engine with its socket below `folder`, and the engine's process."""
    script = folder / "front_end.py"
    script.write_text(FRONT_END)
    environment = {**os.environ, "TMPDIR": str(folder)}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    return parent, psutil.Process(int(parent.stdout.readline()))


def test_the_engine_ends_with_the_process_that_started_it(tmp_path: Path):
    parent, child = front_end(tmp_path)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 3.0
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine outlived its front end"
        time.sleep(0.02)


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(tmp_path: Path):
    parent, _ = front_end(tmp_path)
    (folder,) = tmp_path.glob("sonar-*")
    remove_stale_folders(tmp_path)
    assert (folder / "engine").is_socket()
    parent.kill()
    parent.wait()
    assert folder.exists()
    remove_stale_folders(tmp_path)
    assert not folder.exists()


async def test_a_start_removes_left_sockets_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, empty, with_a_file, of_a_file, elsewhere = (
        tmp_path / name for name in ("sonar-left", "sonar-empty", "sonar-more", "sonar-file", "other")
    )
    for folder in (left, empty, with_a_file, of_a_file, elsewhere):
        folder.mkdir()
    for folder in (left, with_a_file, elsewhere):
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(folder / "engine"))
    (with_a_file / "notes").touch()
    (of_a_file / "engine").touch()
    (tmp_path / "sonar-link").symlink_to(elsewhere)
    async with running():
        pass
    assert not left.exists()
    assert {path.name for path in tmp_path.iterdir()} == {
        "sonar-empty",
        "sonar-more",
        "sonar-file",
        "sonar-link",
        "other",
    }
    assert (with_a_file / "engine").is_socket() and (elsewhere / "engine").is_socket()


async def test_an_idle_engine_uses_no_processor_time():
    async with running(launch=launch_process) as client:
        process = psutil.Process(client.pid)
        await asyncio.sleep(0.2)
        before = sum(process.cpu_times()[:2])
        await asyncio.sleep(0.6)
        assert sum(process.cpu_times()[:2]) - before <= 0.03


class RecordingLink:
    """A link whose incoming messages are given in advance."""

    def __init__(self, incoming: list[messages.Message]) -> None:
        self.incoming = incoming
        self.sent: list[messages.Message] = []

    def send(self, message: messages.Message) -> None:
        self.sent.append(message)

    def receive(self) -> messages.Message:
        return self.incoming.pop(0)

    def receive_ready(self) -> messages.Message | None:
        if self.incoming and not isinstance(self.incoming[0], messages.Shutdown):
            return self.incoming.pop(0)
        return None


def test_all_events_of_a_step_travel_in_one_message():
    engine = build_fake_engine(FakeOptions().config())
    sequence = [messages.Sequence(i, b"\x01\0\0\0", SamplingParams(max_tokens=3)) for i in range(8)]
    link = RecordingLink([messages.Submit(1, sequence), messages.Shutdown()])
    EngineLoop(engine, link).run()
    events = [message for message in link.sent if isinstance(message, messages.Events)]
    assert len(events) == 3
    assert all(len(message.events.request_ids) == 8 * 8 for message in events)


def test_messages_survive_the_wire():
    assert load_factory(FACTORY) is build_fake_engine
    params = SamplingParams(temperature=0.5, logit_bias={3: -1.5}, stop=["x"], seed=-(2**63), logprobs=2)
    message = messages.Submit(1, [messages.Sequence(2, b"\0" * 8, params)])
    wire = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(wire, type=messages.ToEngine) == message
    info = msgspec.structs.replace(build_fake_engine(FakeOptions().config()).info, generation_defaults={"top_k": 5})
    ready = msgspec.msgpack.decode(msgspec.msgpack.encode(messages.Ready(info)), type=messages.ToFrontEnd)
    assert isinstance(ready.info.generation_defaults["top_k"], int)
    error = messages.ErrorReport.of(InvalidRequestError("no", "seed", "bad"))
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(messages.Rejected(1, error)), type=messages.ToFrontEnd)
    assert back.error.to_error().param == "seed"
