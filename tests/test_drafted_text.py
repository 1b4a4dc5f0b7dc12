"""Which characters were drafted: exact under every split, stop string and broken character, and off by default."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_harness import CHAT, COMPLETIONS, HELLO, serving
from sonar_engine.detokenizer import IncrementalDetokenizer
from sonar_engine.server.config import ServerConfig
from sonar_engine.testing.byte_tokenizer import byte_tokenizer
from sonar_engine.testing.fake_engine import FakeOptions
from sonar_engine.types import SamplingParams

BYTES = byte_tokenizer()


def marked(blocks: list[tuple[list[int], int]], **params: object) -> str:
    """Text of (tokens, drafted of them) steps, with drafted characters in brackets."""
    detokenizer = IncrementalDetokenizer(BYTES, SamplingParams(**params), mark_drafted=True)
    shown = ""
    for number, (ids, num_drafted) in enumerate(blocks):
        delta = detokenizer.add(ids, "length" if number == len(blocks) - 1 else None, num_drafted)
        assert delta.drafted is not None
        shown += bracketed(delta.text, delta.drafted)
        if delta.stop is not None:
            break
    return shown.replace("][", "")


def bracketed(text: str, ranges: list) -> str:
    shown, last = "", 0
    for start, end in ranges:
        assert last <= start < end <= len(text) and (start > last or last == 0), ranges
        shown += text[last:start] + "[" + text[start:end] + "]"
        last = end
    return shown + text[last:]


def encode(text: str) -> list[int]:
    """One token a byte."""
    return [token for byte in text.encode() for token in BYTES.encode(bytes([byte]).decode("latin-1"))][: len(text)]


def test_the_first_tokens_of_a_step_are_its_drafts():
    assert marked([(encode("abc"), 2), (encode("d"), 0), (encode("ef"), 1), (encode("g"), 0)]) == "[ab]cd[e]fg"


def test_drafts_that_a_stop_left_out_do_not_count():
    assert marked([(encode("a"), 0), (encode("bc"), 5)]) == "a[bc]"


def test_text_held_back_for_a_stop_string_keeps_its_marks():
    assert marked([(encode("aEN"), 1), (encode("xEb"), 2), (encode("z"), 0)], stop=["END"]) == "[a]EN[xE]bz"
    assert marked([(encode("aEN"), 1), (encode("xE"), 2)], stop=["END"]) == "[a]EN[xE]"


def test_marks_end_where_a_stop_string_cut_the_text():
    assert marked([(encode("abEN"), 4), (encode("Dxy"), 3)], stop=["END"]) == "[ab]"
    kept = marked([(encode("abEN"), 4), (encode("Dxy"), 3)], stop=["END"], include_stop_str_in_output=True)
    assert kept == "[abEND]"


@pytest.mark.parametrize(
    ("num_drafted", "shown"), [((1, 0), "a\u20acb"), ((3, 1), "[a\u20ac]b"), ((2, 1), "[a]\u20acb")]
)
def test_a_character_of_several_tokens_is_drafted_when_all_of_them_were(num_drafted, shown):
    ids = BYTES.encode("a\u20acb")
    assert len(ids) == 5
    first, second = num_drafted
    if first == 1:
        assert marked([(ids[:2], 1), (ids[2:], second)]) == f"[a]{shown[1:]}"
    else:
        assert marked([(ids[:3], first), (ids[3:], second)]) == shown


def test_bytes_left_over_at_the_end_are_drafted_like_their_tokens():
    ids = BYTES.encode("\u20ac")
    assert marked([(ids[:2], 2)]) == "[\ufffd]"
    assert marked([(ids[:2], 1)]) == "\ufffd"


def test_a_token_that_ends_one_character_and_begins_another_is_part_of_both():
    first, second = BYTES.encode("\u00e9")
    ids = [first, first, second]  # the second is no continuation: it gives up the first and begins anew
    assert marked([(ids[:2], 0), (ids[2:], 1)]) == "\ufffd\u00e9"
    assert marked([(ids[:1], 0), (ids[1:], 2)]) == "\ufffd[\u00e9]"


def test_skipped_special_tokens_leave_no_mark():
    end = BYTES.raw.token_to_id("<|im_end|>")
    assert marked([([end, *encode("ab")], 0), ([end, *encode("c")], 2)]) == "ab[c]"
    assert marked([([end, *encode("a")], 2), ([*encode("b"), end, *encode("c")], 1), (encode("d"), 1)]) == "[ab]c[d]"


steps = st.lists(st.tuples(st.lists(st.integers(0, BYTES.vocab_size - 1), min_size=1, max_size=6), st.integers(0, 6)))


@given(steps.filter(bool), st.sampled_from([[], ["a"], ["th", "he"], ["in on"]]))
def test_marking_changes_no_text_and_all_or_nothing_drafted_is_all_or_nothing(blocks, stop):
    plain = marked([(ids, 0) for ids, _ in blocks], stop=stop, include_stop_str_in_output=True)
    every = marked([(ids, len(ids)) for ids, _ in blocks], stop=stop, include_stop_str_in_output=True)
    detokenizer = IncrementalDetokenizer(BYTES, SamplingParams(stop=stop, include_stop_str_in_output=True))
    text = ""
    for number, (ids, _) in enumerate(blocks):
        delta = detokenizer.add(ids, "length" if number == len(blocks) - 1 else None)
        assert delta.drafted is None
        text += delta.text
        if delta.stop is not None:
            break
    if not {"[", "]"} & set(text):
        assert plain == text
        assert every == (f"[{text}]" if text else "")


async def test_streamed_and_whole_answers_say_the_same():
    """The engine's steps give three tokens, of which the first two are drafts; the prompt's own gives one."""
    async with serving(FakeOptions(tokens_per_step=3)) as server:
        fields = {"max_tokens": 10, "temperature": 0, "return_drafted": True}
        whole = (await server.post(CHAT, messages=HELLO, **fields)).json()["choices"][0]
        assert whole["drafted"] == [[1, 3], [4, 6], [7, 9]]
        events = await server.events(CHAT, messages=HELLO, **fields)
        at, shown = 0, []
        for choice in events.of(0):
            text = choice["delta"].get("content", "")
            assert ("drafted" in choice) == bool(text)
            shown += [[at + start, at + end] for start, end in choice.get("drafted", [])]
            at += len(text)
        assert shown == whole["drafted"]


async def test_an_echoed_prompt_is_counted_and_not_drafted():
    async with serving(FakeOptions(tokens_per_step=3)) as server:
        fields = {"max_tokens": 4, "temperature": 0, "return_drafted": True}
        assert (await server.text("hello", echo=True, **fields))["drafted"] == [[6, 8]]
        assert (await server.text("hello", **fields))["drafted"] == [[1, 3]]
        chunks = (await server.events(COMPLETIONS, prompt="hello", echo=True, **fields)).of(0)
        assert "drafted" not in chunks[0] and chunks[0]["text"] == "hello"


async def test_every_choice_has_its_own_marks_and_ids_may_be_asked_for_beside():
    async with serving(FakeOptions(tokens_per_step=3)) as server:
        fields = {"n": 2, "seed": 5, "max_tokens": 4, "return_drafted": True, "return_token_ids": True}
        events = await server.events(COMPLETIONS, prompt="hello", **fields)
        for index in (0, 1):
            said = [choice for choice in events.of(index) if choice["text"]]
            assert [choice["drafted"] for choice in said if choice.get("token_ids")] == [[], [[0, 2]]]


async def test_nothing_is_drafted_where_speculation_is_off_and_nothing_is_said_unasked():
    async with serving(FakeOptions(tokens_per_step=3), ServerConfig()) as server:
        off = await server.text("hello", max_tokens=6, return_drafted=True, speculative={"enabled": False})
        assert off["drafted"] == []
        assert "drafted" not in await server.text("hello", max_tokens=6)
        events = await server.events(CHAT, messages=HELLO, max_tokens=6)
        assert all("drafted" not in choice for choice in events.of(0))
