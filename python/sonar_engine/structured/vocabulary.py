"""The model's tokens as llguidance wants them."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from sonar_engine.tokenizer import Tokenizer

WORD = 32  # ids a word of a mask
SPECIAL = b"\xff"  # no text has this byte: so llguidance marks special tokens, which grammars name as <|name|>


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask over `vocab_size` ids."""
    return -(-vocab_size // WORD)


def grammar_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """`vocab_size` is the width of the logits; ids without a token are never allowed. Takes half a second."""
    width = mask_words(vocab_size) * WORD
    return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, width, eos_token_ids)), width, list(eos_token_ids))


class _Tokens:
    """The attributes that `TokenizerWrapper` reads."""

    def __init__(self, tokenizer: Tokenizer, width: int, eos_token_ids: Sequence[int]) -> None:
        special = tokenizer.special_ids | set(eos_token_ids)
        self.tokens = [_spelled(tokenizer, i, special) for i in range(width)]
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(), add_special_tokens=False)


def _spelled(tokenizer: Tokenizer, token_id: int, special: set[int] | frozenset[int]) -> bytes:
    if token_id >= tokenizer.vocab_size:
        return b""
    if token_id not in special:
        return tokenizer.token_bytes(token_id)
    name = tokenizer.raw.id_to_token(token_id)
    return SPECIAL + name.encode() if name else b""
