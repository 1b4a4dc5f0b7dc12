"""Incremental text: equal to the whole decoding, never half a character, stop strings wherever they fall."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from sonar_engine.detokenizer import IncrementalDetokenizer
from sonar_engine.testing.byte_tokenizer import byte_tokenizer
from sonar_engine.types import SamplingParams
from tokenizers import decoders, models

BYTES = byte_tokenizer()


def sentencepiece_like() -> SimpleNamespace:
    """Llama 2's scheme: a marker for spaces and one token a byte for what the vocabulary lacks."""
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "Hello", "▁world", "a", "é"]
    raw = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True)
    )
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<s>", "</s>"])
    return SimpleNamespace(raw=raw, special_ids=frozenset({0, 1}), vocab_size=len(tokens))


SENTENCEPIECE = sentencepiece_like()


def split(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """`ids` in blocks of `sizes`, then one by one."""
    blocks, start = [], 0
    for size in [*sizes, *([1] * len(ids))]:
        blocks.append(ids[start : start + size])
        start += size
    return [block for block in blocks if block]


def run(tokenizer: object, blocks: list[list[int]], finish: str = "length", **params: object) -> tuple[list, str, int]:
    """(text deltas, stop string or None, tokens counted)"""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**params))
    texts, count = [], 0
    for index, block in enumerate(blocks):
        delta = detokenizer.add(block, finish if index == len(blocks) - 1 else None)
        texts.append(delta.text)
        count += delta.num_tokens
        if delta.stop is not None:
            return texts, delta.stop, count
    return texts, None, count


sizes = st.lists(st.integers(1, 7), max_size=20)


@given(st.lists(st.integers(0, BYTES.vocab_size + 3), min_size=1, max_size=60), sizes, st.booleans())
def test_deltas_of_any_byte_level_tokens_add_up_to_the_whole_decoding(ids, sizes, skip):
    texts, _, count = run(BYTES, split(ids, sizes), skip_special_tokens=skip)
    assert "".join(texts) == BYTES.decode(ids, skip_special_tokens=skip)
    assert count == len(ids)


@given(st.text(max_size=40), sizes)
def test_text_split_at_any_byte_comes_out_whole_and_without_replacement_characters(text, sizes):
    ids = BYTES.encode(text + "!")
    texts, _, _ = run(BYTES, split(ids, sizes))
    assert "".join(texts) == text + "!"
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in texts)


words = st.sampled_from([[0], [1], [258], [259], [260], [261], [262], [263]])
byte_runs = st.characters(exclude_categories=["Cs"]).map(lambda character: [byte + 2 for byte in character.encode()])


@given(st.lists(words | byte_runs, min_size=1, max_size=20), sizes, st.booleans())
@settings(deadline=None)
def test_deltas_of_byte_fallback_tokens_add_up_to_the_whole_decoding(parts, sizes, skip):
    ids = [token for part in parts for token in part]
    texts, _, _ = run(SENTENCEPIECE, split(ids, sizes), skip_special_tokens=skip)
    assert "".join(texts) == SENTENCEPIECE.raw.decode(ids, skip_special_tokens=skip)


def test_an_emoji_split_over_tokens_appears_with_its_last_byte():
    ids = BYTES.encode("😀")
    assert len(ids) == 4
    texts, _, _ = run(BYTES, [*[[i] for i in ids], BYTES.encode("x")])
    assert texts == ["", "", "", "😀", "x"]


def test_spaces_between_special_tokens_stay():
    ids = BYTES.encode("<|im_start|> a <|im_end|> b")
    assert "".join(run(BYTES, split(ids, []))[0]) == " a  b"
    assert "".join(run(BYTES, split(ids, []), skip_special_tokens=False)[0]) == "<|im_start|> a <|im_end|> b"


def reference_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Reading character by character: (end, stop) of the first stop string to be completed."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return end, max(done, key=len)
    return None


abc = st.text(alphabet="abc", min_size=1, max_size=4)


@given(st.text(alphabet="abc", min_size=1, max_size=30), st.lists(abc, min_size=1, max_size=3), sizes, st.booleans())
def test_the_first_stop_string_to_be_completed_wins_however_tokens_are_split(text, stops, sizes, include):
    ids = BYTES.encode(text)
    assert len(ids) == len(text)
    texts, stop, count = run(BYTES, split(ids, sizes), stop=stops, include_stop_str_in_output=include)
    expected = reference_stop(text, stops)
    if expected is None:
        assert ("".join(texts), stop, count) == (text, None, len(ids))
    else:
        end, matched = expected
        assert ("".join(texts), stop, count) == (text[: end if include else end - len(matched)], matched, end)


@given(st.text(alphabet="abc", min_size=1, max_size=30), st.lists(abc, min_size=1, max_size=3))
def test_only_a_true_partial_match_is_held_back(text, stops):
    detokenizer = IncrementalDetokenizer(BYTES, SamplingParams(stop=stops))
    given_out = ""
    for position, token in enumerate(BYTES.encode(text)):
        delta = detokenizer.add([token])
        given_out += delta.text
        if delta.stop is not None:
            break
        seen = text[: position + 1]
        held = seen[len(given_out) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_that_straddles_blocks_leaks_nothing():
    blocks = [BYTES.encode(part) for part in ("ABC DEF", "G", "HI", "J and more")]
    texts, stop, _ = run(BYTES, blocks, stop=["DEFGHIJ"])
    assert texts == ["ABC ", "", "", ""] and stop == "DEFGHIJ"


def test_held_text_comes_out_when_no_match_comes():
    blocks = [BYTES.encode(part) for part in ("ABC DEF", "G", "HI")]
    assert run(BYTES, blocks, stop=["DEFGHIJ"])[0] == ["ABC ", "", "DEFGHI"]
    assert run(BYTES, [*blocks, BYTES.encode("x")], stop=["DEFGHIJ"])[0] == ["ABC ", "", "", "DEFGHIx"]


def test_tokens_after_a_stop_string_in_the_same_block_do_not_count():
    ids = BYTES.encode("one. two")
    texts, stop, count = run(BYTES, [ids], stop=["."])
    assert "".join(texts) == "one" and stop == "."
    assert count == len(BYTES.encode("one."))


def test_a_stop_string_completed_before_min_tokens_is_ordinary_text():
    ids = BYTES.encode("a.b.c.d")
    texts, stop, count = run(BYTES, split(ids, [3]), stop=["."], min_tokens=4)
    assert "".join(texts) == "a.b" and stop == "." and count == 4


@pytest.mark.parametrize(("include", "expected"), [(False, "hi"), (True, "hi!")])
def test_the_stop_tokens_own_text_is_left_out_unless_asked_for(include, expected):
    ids = BYTES.encode("hi!")
    texts, stop, count = run(BYTES, [ids], finish="stop", include_stop_str_in_output=include)
    assert ("".join(texts), stop, count) == (expected, None, 3)


def test_a_lone_half_character_at_the_end_reads_as_in_the_whole_decoding():
    ids = BYTES.encode("x😀")[:-1]
    texts, _, _ = run(BYTES, split(ids, []))
    assert "".join(texts) == BYTES.decode(ids) == "x\ufffd"
