"""Token ids to text as it grows: never half a character, and stop strings found wherever they fall.

The concatenated deltas of a sequence equal the decoding of all its tokens, cut at the stop string if there is one.
"""

from __future__ import annotations

import codecs
import json
from typing import TYPE_CHECKING, Protocol

import msgspec

from sonar_engine.drafted_text import DraftedText, Ranges
from sonar_engine.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    import tokenizers

REPLACEMENT = "\ufffd"


class DetokenizingTokenizer(Protocol):
    """The part of `sonar_engine.tokenizer.Tokenizer` that text output needs."""

    @property
    def raw(self) -> tokenizers.Tokenizer: ...

    @property
    def special_ids(self) -> frozenset[int]: ...


class TextDelta(msgspec.Struct, frozen=True):
    """New text of one sequence.

    `num_tokens` counts the given tokens that belong to the output: fewer than given only when `stop`, the stop
    string, was completed inside them. `drafted` are the characters of `text` that were drafted, None if not asked for.
    """

    text: str
    num_tokens: int
    stop: str | None = None
    drafted: Ranges | None = None


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies spell each byte as one printable character (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


def is_byte_level(raw: tokenizers.Tokenizer) -> bool:
    """Whether decoding is the concatenation of the tokens' bytes."""
    return raw.decoder is not None and json.loads(raw.decoder.__getstate__())["type"] == "ByteLevel"


def byte_level_token(raw: tokenizers.Tokenizer, token_id: int) -> bytes:
    """Bytes of one token of a byte-level vocabulary; empty for an id without a token."""
    token = raw.id_to_token(token_id)
    if token is None:
        return b""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token is spelled as itself
        return token.encode()


class _ByteLevelText:
    """Text of a byte-level vocabulary: an incremental UTF-8 decoder over the tokens' bytes."""

    def __init__(self, raw: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._raw = raw
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(byte_level_token(self._raw, token_id))

    @property
    def unfinished(self) -> bool:
        """Whether the tokens end inside a character."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowText:
    """Text of any other vocabulary: what the decoding of a short window of tokens has grown by.

    The window starts at the last point where text was complete, so that context-dependent decoders (leading
    spaces, byte fallback) see the same neighbours as in a full decoding. Byte fallback that turns a whole run of
    bytes into replacement characters for one bad byte cannot be followed back over text that is out.
    """

    def __init__(self, raw: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._raw = raw
        self._skip = bool(skipped)
        self._skipped = skipped
        self._ids: list[int] = []
        self._num_given = 0  # ids of the window whose text is out
        self._given = ""  # their text

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._decode()
        if text.endswith(REPLACEMENT):
            return ""
        delta = text[len(self._given) :]
        if delta:
            del self._ids[: self._num_given]
            self._num_given, self._given = len(self._ids), self._decode()
        return delta

    @property
    def unfinished(self) -> bool:
        return self._num_given < len(self._ids)

    def flush(self) -> str:
        return self._decode()[len(self._given) :]

    def _decode(self) -> str:
        return self._raw.decode(self._ids, skip_special_tokens=self._skip)


class _StopStrings:
    """Finds stop strings in growing text. Splitting the text differently finds the same one: the first to end."""

    def __init__(self, stops: list[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""  # the longest suffix that a stop string may still continue

    def push(self, delta: str, matching: bool = True) -> tuple[str, str | None]:
        """Text that is certain by now, and the stop string completed in it."""
        text = self._held + delta
        found = self._first_to_end(text, len(self._held)) if matching else None
        if found is not None:
            end, stop = found
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        keep = self._partial_match_len(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _first_to_end(self, text: str, num_old: int) -> tuple[int, str] | None:
        """(end, stop) of the match that ends first, the longest of those; it ends beyond `num_old` characters."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(num_old - len(stop) + 1, 0))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, -len(stop)) < (best[0], -len(best[1])):
                best = (end, stop)
        return best

    def _partial_match_len(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
            while 0 <= start < len(text) - longest:
                if stop.startswith(text[start:]):
                    longest = len(text) - start
                    break
                start = text.find(stop[0], start + 1)
        return longest


class IncrementalDetokenizer:
    """One sequence's text.

    `params` gives the stop strings, whether they stay in the text, `min_tokens` (a stop string completed by an
    earlier token is ordinary text), and whether special tokens are skipped. With `mark_drafted` every delta says
    which of its characters were drafted.
    """

    def __init__(self, tokenizer: DetokenizingTokenizer, params: SamplingParams, *, mark_drafted: bool = False) -> None:
        raw = tokenizer.raw
        skipped = frozenset(tokenizer.special_ids) if params.skip_special_tokens else frozenset[int]()
        self._text = _ByteLevelText(raw, skipped) if is_byte_level(raw) else _WindowText(raw, skipped)
        self._stops = _StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._keep_stop_token = params.include_stop_str_in_output
        self._num_tokens = 0
        self._skipped = skipped
        self._drafted = DraftedText() if mark_drafted else None

    def add(self, token_ids: list[int], finish_reason: FinishReason | None = None, num_drafted: int = 0) -> TextDelta:
        """Take the next tokens, several at once, and give the text that is certain by now.

        With a `finish_reason` they are the last ones and all held text comes out. Reason "stop" means that the
        last token is the stop token: its own text is left out unless the stop is to be included. When a stop
        string is completed, text and count end there and the detokenizer must not be used again.
        The first `num_drafted` tokens were drafts.
        """
        parts: list[str] = []
        spoken = len(token_ids)
        if finish_reason == "stop" and not self._keep_stop_token:
            spoken -= 1
        for index, token_id in enumerate(token_ids[: max(spoken, 0)]):
            self._num_tokens += 1
            text = self._text.push(token_id)
            if self._drafted is not None and token_id not in self._skipped:
                self._drafted.push(len(text), index < num_drafted, self._text.unfinished)
            stop = self._emit(text, parts)
            if stop is not None:
                return self._delta(parts, index + 1, stop)
        if finish_reason is not None:
            text = self._text.flush()
            if self._drafted is not None:
                self._drafted.flush(len(text))
            stop = self._emit(text, parts)
            if stop is not None:
                return self._delta(parts, len(token_ids), stop)
            if self._stops is not None:
                parts.append(self._stops.flush())
        return self._delta(parts, len(token_ids))

    def _delta(self, parts: list[str], num_tokens: int, stop: str | None = None) -> TextDelta:
        text = "".join(parts)
        drafted = None if self._drafted is None else self._drafted.release(len(text))
        return TextDelta(text, num_tokens, stop, drafted)

    def _emit(self, delta: str, parts: list[str]) -> str | None:
        """Append what `delta` makes certain to `parts`; the stop string it completes, if any."""
        if not delta:
            return None
        if self._stops is None:
            parts.append(delta)
            return None
        text, stop = self._stops.push(delta, self._num_tokens >= self._min_tokens)
        if text:
            parts.append(text)
        return stop
