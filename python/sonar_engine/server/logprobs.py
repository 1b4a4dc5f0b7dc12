"""Log-probabilities in the shapes of the two completion APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sonar_engine.tokenizer import Tokenizer
from sonar_engine.types import TokenLogprobs

LOWEST = -9999.0  # JSON has no infinity


def chat_logprobs(tokenizer: Tokenizer, token_ids: list[int], entries: list[TokenLogprobs]) -> dict[str, Any]:
    """`{"content": [...]}` with an entry a token."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        top = [_chat_token(tokenizer, other, logprob) for other, logprob in pairs]
        content.append(_chat_token(tokenizer, token_id, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token_id)
    text = spelled.decode("utf-8", "replace")
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(spelled)}


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: list[int], entries: Sequence[TokenLogprobs | None], text_offset: int
) -> dict[str, Any]:
    """Parallel lists; `text_offset` counts characters from the first token's start. Half characters count 0.

    An entry is None for the first token of a prompt, which nothing foretells.
    """
    tokens, logprobs, tops, offsets = [], [], [], []
    for token_id, entry in zip(token_ids, entries, strict=True):
        tokens.append(_spell(tokenizer, token_id))
        logprobs.append(None if entry is None else max(entry.logprob, LOWEST))
        tops.append(None if entry is None else _completion_tops(tokenizer, token_id, entry))
        offsets.append(text_offset)
        text_offset += num_characters(tokenizer, token_id)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _completion_tops(tokenizer: Tokenizer, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
    pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
    top = {_spell(tokenizer, other): max(logprob, LOWEST) for other, logprob in pairs}
    return top | {_spell(tokenizer, token_id): max(entry.logprob, LOWEST)}


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: list[int], entries: list[TokenLogprobs]
) -> list[dict[str, dict[str, Any]] | None]:
    """By position: None for the first token, then the most likely ids and the prompt's own, as vLLM gives them."""
    positions: list[dict[str, dict[str, Any]] | None] = [None]
    for token_id, entry in zip(prompt[1:], entries, strict=True):
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        found = {other: (logprob, rank + 1) for rank, (other, logprob) in enumerate(pairs)}
        found[token_id] = entry.logprob, entry.rank
        positions.append(
            {
                str(other): {
                    "logprob": max(logprob, LOWEST),
                    "rank": rank,
                    "decoded_token": _spell(tokenizer, other),
                }
                for other, (logprob, rank) in found.items()
            }
        )
    return positions


def _spell(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text, or its bytes in the form `bytes:\\xe2\\x82` where they are no whole characters."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def num_characters(tokenizer: Tokenizer, token_id: int) -> int:
    """Characters that begin in this token."""
    return sum((byte & 0xC0) != 0x80 for byte in tokenizer.token_bytes(token_id))
