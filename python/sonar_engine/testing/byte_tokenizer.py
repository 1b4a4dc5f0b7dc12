"""A tokenizer of bytes with the interface of `sonar_engine.tokenizer.Tokenizer`, for servers without a model."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from sonar_engine.detokenizer import byte_level_token


class ByteTokenizer:
    """Ids 0..255 are bytes in the order of the byte-level alphabet, then merged words, then special tokens."""

    def __init__(self) -> None:
        self.raw = _byte_level_tokenizer()
        self.special_ids = frozenset(i for i, token in self.raw.get_added_tokens_decoder().items() if token.special)
        self.eos_token_ids = [self._id("<|im_end|>")]
        self.vocab_size = self.raw.get_vocab_size()

    def _id(self, token: str) -> int:
        token_id = self.raw.token_to_id(token)
        if token_id is None:
            raise KeyError(token)
        return token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.raw.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.raw.id_to_token(token_id) or "" for token_id in ids]

    def id_to_bytes(self, token_id: int) -> bytes:
        return byte_level_token(self.raw, token_id)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """ChatML, as many small chat models use it."""
        parts = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
        if continue_final_message:
            parts[-1] = parts[-1].removesuffix("<|im_end|>\n")
        elif add_generation_prompt:
            parts.append("<|im_start|>assistant\n")
        return "".join(parts)

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **kwargs), add_special_tokens=False)


def _byte_level_tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges = [("t", "h"), ("h", "e"), ("th", "e"), ("i", "n"), ("o", "n")]
    for word in ("th", "he", "the", "in", "on"):
        vocab[word] = len(vocab)
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    raw.add_tokens(["added words"])
    return raw
