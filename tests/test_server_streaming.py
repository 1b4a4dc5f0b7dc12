"""Streams: order of chunks, deltas that add up, pings, errors after the headers, and readers that go away."""

from __future__ import annotations

import asyncio
import json

import pytest
from server_harness import CHAT, COMPLETIONS, HELLO, Events, Served, serving
from sonar_engine.engine_connection import launch_process
from sonar_engine.server.config import ServerConfig
from sonar_engine.testing.fake_engine import FakeOptions

ECHO = FakeOptions(echo=True, tokens_per_step=3)


async def test_the_first_chunk_has_the_role_and_the_last_the_finish_reason():
    async with serving(FakeOptions(tokens_per_step=3)) as served:
        events = await served.events(CHAT, messages=HELLO, max_tokens=8)
    first, *middle, last = events.chunks
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in events.chunks] == [None] * (len(middle) + 1) + ["length"]
    assert last["choices"][0]["delta"] == {}
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert {(chunk["id"], chunk["model"], chunk["created"]) for chunk in events.chunks} == {
        (first["id"], "fake", first["created"])
    }


@pytest.mark.parametrize("width", [1, 4])
async def test_deltas_add_up_to_the_whole_answer(width):
    async with serving(FakeOptions(tokens_per_step=width)) as served:
        body = {"messages": HELLO, "max_tokens": 21, "temperature": 0, "logprobs": True, "top_logprobs": 1}
        whole = (await served.post(CHAT, **body)).json()["choices"][0]
        events = await served.events(CHAT, **body)
    assert events.text() == whole["message"]["content"]
    assert events.finish() == whole["finish_reason"]
    entries = [e for c in events.of(0) if c["logprobs"] for e in c["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]


async def test_the_choices_of_a_stream_each_end_once():
    async with serving(FakeOptions(tokens_per_step=2)) as served:
        body = {"messages": HELLO, "max_tokens": 9, "n": 3, "seed": 5}
        whole = (await served.post(CHAT, **body)).json()["choices"]
        events = await served.events(CHAT, **body)
    for choice in whole:
        assert events.text(choice["index"]) == choice["message"]["content"]
        assert events.finish(choice["index"]) == "length"
        assert events.of(choice["index"])[0]["delta"] == {"role": "assistant"}


async def test_the_usage_chunk_comes_once_without_choices_before_the_end():
    async with serving() as served:
        for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "ab"})):
            whole = (await served.post(path, **body, max_tokens=5)).json()["usage"]
            events = await served.events(path, **body, max_tokens=5, stream_options={"include_usage": True})
            *others, last = events.chunks
            assert last["choices"] == [] and last["usage"] == whole
            assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
            plain = await served.events(path, **body, max_tokens=5)
            assert not any("usage" in chunk for chunk in plain.chunks)


async def test_metrics_come_with_the_last_chunk_when_asked_for():
    async with serving(FakeOptions(tokens_per_step=3)) as served:
        events = await served.events(COMPLETIONS, prompt="a", max_tokens=7, return_metrics=True)
    assert events.chunks[-1]["choices"] == []
    assert events.chunks[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] == 2


async def test_a_completion_stream_carries_logprobs_with_running_offsets():
    async with serving(ECHO) as served:
        whole = (await served.text("the é!abc", logprobs=1))["logprobs"]
        events = await served.events(COMPLETIONS, prompt="the é!abc", logprobs=1)
    joined: dict[str, list] = {key: [] for key in whole}
    for choice in events.of(0):
        for key, values in (choice["logprobs"] or {}).items():
            joined[key] += values
    assert joined == whole


async def test_an_emoji_split_over_tokens_streams_without_replacement_characters():
    text = "a😀字é"
    async with serving(FakeOptions(echo=True)) as served:
        events = await served.events(COMPLETIONS, prompt=text, max_tokens=50)
    assert events.text() == text
    assert all("\ufffd" not in choice["text"] for choice in events.of(0))
    assert all(choice["text"] for choice in events.of(0)[:-1])


async def test_a_stop_string_over_several_chunks_leaks_nothing():
    async with serving(ECHO) as served:
        events = await served.events(COMPLETIONS, prompt="abcDEFGHIJklm", max_tokens=50, stop=["DEFGHIJ"])
        assert (events.text(), events.finish()) == ("abc", "stop")
        unmatched = await served.events(COMPLETIONS, prompt="abcDEFGHI", max_tokens=50, stop=["DEFGHIJ"])
        assert unmatched.text() == "abcDEFGHI"
        await served.until_idle()


async def test_ids_of_a_stream_equal_those_of_the_whole_answer():
    async with serving(ECHO) as served:
        body = {"messages": [{"role": "user", "content": "😀"}], "return_token_ids": True, "ignore_eos": True}
        whole = (await served.post(CHAT, **body, max_tokens=30)).json()["choices"][0]
        events = await served.events(CHAT, **body, max_tokens=30)
    assert events.chunks[0]["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [i for choice in events.of(0) for i in choice.get("token_ids", ())] == whole["token_ids"]


async def test_the_echoed_prompt_is_the_first_chunk():
    async with serving() as served:
        events = await served.events(COMPLETIONS, prompt="the cat", max_tokens=3, echo=True)
    assert events.of(0)[0]["text"] == "the cat"


async def test_a_long_silence_is_filled_with_pings():
    async with serving(FakeOptions(step_seconds=0.05, prefill_steps=6), ServerConfig(ping_interval=0.05)) as served:
        events = await served.events(CHAT, messages=HELLO, max_tokens=2)
    assert events.pings >= 2 and events.finish() == "length"


async def test_an_engine_that_fails_under_way_ends_the_stream_with_an_error_event():
    async with serving(FakeOptions(fail_after_steps=5)) as served:
        events = await served.events(CHAT, messages=HELLO)
        later = await served.post(CHAT, messages=HELLO)
        health = await served.http.get("/health")
    error = events.chunks[-1]["error"]
    assert error["type"] == "server_error" and error["code"] == "engine_dead"
    assert events.finish() is None
    assert later.status_code == health.status_code == 503


async def test_a_whole_answer_under_way_is_500_when_the_engine_fails():
    async with serving(FakeOptions(fail_after_steps=5)) as served:
        response = await served.post(CHAT, messages=HELLO)
    assert response.status_code == 500 and response.json()["error"]["code"] == "engine_dead"


async def test_a_hanging_engine_fails_health_while_its_process_lives():
    async with serving(
        FakeOptions(hang_after_steps=1), ServerConfig(probe_timeout=0.3), launch=launch_process
    ) as served:
        response = await served.http.get("/health")
        metrics = await served.http.get("/metrics")
    assert response.status_code == 503 and metrics.status_code == 200


async def test_an_admin_abort_ends_exactly_the_response_with_that_id():
    async with serving(FakeOptions(step_seconds=0.005), ServerConfig(admin_key="root")) as served:
        admin = {"Authorization": "Bearer root"}
        tasks = [asyncio.create_task(served.events(CHAT, messages=HELLO, max_tokens=300)) for _ in range(3)]
        while len(served.state.responses) < 3:
            await asyncio.sleep(0.01)
        target = next(iter(served.state.responses))
        for prefix in ("", target[:12], target[:-1], target + "x", "chatcmpl-"):
            refused = await served.http.post("/abort", json={"request_id": prefix}, headers=admin)
            assert refused.status_code == 404
        assert len(served.state.responses) == 3
        done = await served.http.post("/abort", json={"request_id": target}, headers=admin)
        assert done.json() == {"id": target, "aborted": True}
        streams = await asyncio.gather(*tasks)
    finishes = {events.chunks[0]["id"]: events.finish() for events in streams}
    assert finishes.pop(target) == "abort" and set(finishes.values()) == {"length"}


class Reader:
    """A client of the application that can hang up: raw ASGI, so that the moment is exact."""

    def __init__(self, served: Served, path: str, body: dict, reading: bool = True) -> None:
        self.parts: list[bytes] = []
        self.reading = asyncio.Event()
        if reading:
            self.reading.set()
        self._incoming: asyncio.Queue[dict] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        app = served.http._transport.app
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._send))

    async def _send(self, message: dict) -> None:
        await self.reading.wait()
        self.parts.append(message.get("body", b""))

    def hang_up(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "running", "ended"])
async def test_a_client_that_goes_away_frees_its_pages_in_every_phase(stream, phase):
    options = FakeOptions(step_seconds=0.02, prefill_steps=5 if phase == "prefill" else 1)
    async with serving(options, max_num_seqs=1) as served:
        blocker = None
        if phase == "queued":
            blocker = Reader(served, COMPLETIONS, {"prompt": "b", "max_tokens": 2000})
            await asyncio.sleep(0.1)
        length = 2 if phase == "ended" else 1000
        reader = Reader(served, COMPLETIONS, {"prompt": "a", "max_tokens": length, "stream": stream, "n": 2})
        await asyncio.sleep(0.2 if phase == "ended" else 0.09)
        assert reader.task.done() == (phase == "ended")
        reader.hang_up()
        await asyncio.wait_for(reader.task, 1.0)
        if blocker is not None:
            assert len(served.state.responses) == 1
            blocker.hang_up()
        await served.until_idle()
        assert served.client.num_open_requests == 0
        await asyncio.sleep(0.01)
        assert served.state.num_in_flight == 0 and served.state.num_queued_tokens == 0


async def test_a_slow_reader_blocks_nobody_and_loses_nothing():
    async with serving(FakeOptions(tokens_per_step=2)) as served:
        body = {"prompt": "a", "max_tokens": 400, "stream": True, "seed": 1}
        slow = Reader(served, COMPLETIONS, body, reading=False)
        others = await asyncio.gather(*(served.text("b", max_tokens=50) for _ in range(5)))
        assert all(other["finish_reason"] == "length" for other in others)
        while not await served.idle():
            await asyncio.sleep(0.01)
        assert not slow.task.done()
        slow.reading.set()
        await asyncio.wait_for(slow.task, 5.0)
        whole = await served.text("a", max_tokens=400, seed=1)
    assert Events.read(b"".join(slow.parts).decode()).text() == whole["text"]
