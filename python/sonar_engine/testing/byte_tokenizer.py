"""A tokenizer of bytes, for servers without a model."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from sonar_engine.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = [("t", "h"), ("h", "e"), ("th", "e"), ("i", "n"), ("o", "n")]  # so that text and tokens do not align


def byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are bytes in the order of the byte-level alphabet, then merged words, then special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    raw.add_tokens(["added words"])
    return Tokenizer(raw, special_tokens={"eos_token": "<|im_end|>"}, chat_template=CHATML)
