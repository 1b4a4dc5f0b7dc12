"""The tokenizer inside a GGUF file, as a `tokenizers.Tokenizer` built straight from its vocabulary and merges.

Byte-level BPE (`tokenizer.ggml.model` gpt2) with the pre-tokenizers of llama.cpp's `tokenizer.ggml.pre`, and
SentencePiece BPE (`llama`), whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sonar_engine.errors import ModelLoadError, TokenizerMissingError

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_WORD_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = ("gpt-2", "default", "gpt2", "olmo", "phi-2", "mpt")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "codeshell")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end a turn or a text in the templates of the supported families, whatever the eos key says.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>")
_SPACE = "\u2581"  # SentencePiece's word boundary


def build_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Raises ModelLoadError for a kind that is not supported or fields that do not fit together."""
    tokens = listed(metadata, "tokenizer.ggml.tokens")
    if not all(isinstance(token, str) for token in tokens) or not tokens:
        raise TokenizerMissingError(
            f"{where} has no vocabulary (tokenizer.ggml.tokens); give a tokenizer folder with it"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelLoadError(f"{where}: {len(tokens) - len(vocabulary)} tokens of the vocabulary appear twice")
    kind = metadata.get("tokenizer.ggml.model")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(metadata, vocabulary, where)
        elif kind == "llama":
            tokenizer = _sentencepiece(metadata, vocabulary, where)
        else:
            raise ModelLoadError(f"{where}: tokenizer model {kind!r} is not supported; supported are gpt2 and llama")
    except ModelLoadError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ModelLoadError(f"{where}: vocabulary and merges do not fit together: {error}") from None
    _add_special_tokens(tokenizer, metadata, tokens)
    _add_bos(tokenizer, metadata, tokens, kind)
    return tokenizer


def listed(metadata: Mapping[str, Any], key: str) -> list[Any]:
    """An array of the metadata; empty when it is absent or not an array."""
    value = metadata.get(key)
    return value if isinstance(value, list) else []


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int], where: str) -> Tokenizer:
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    merges = [_merge_pair(line, where) for line in listed(metadata, "tokenizer.ggml.merges")]
    model = models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=pre in _LLAMA3)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _SINGLE_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in _LLAMA3 or pre in _QWEN2:
        split = Regex(_WORD_SPLIT % (3 if pre in _LLAMA3 else 1))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(split, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if pre in _QWEN2:
            tokenizer.normalizer = normalizers.NFC()
    else:
        known = ", ".join((*_GPT2, *_SINGLE_DIGITS, *_LLAMA3, *_QWEN2))
        raise ModelLoadError(
            f"{where}: pre-tokenizer {pre!r} is not supported (supported are {known}); give the tokenizer of the "
            "original model as a folder"
        )
    return tokenizer


def _merge_pair(line: str, where: str) -> tuple[str, str]:
    rest, _, right = line[1:].partition(" ")
    left = line[:1] + rest
    if not right:
        raise ModelLoadError(f"{where}: merge {line!r} is not two tokens with a space between")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: dict[str, int], where: str) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary):
        raise ModelLoadError(f"{where}: tokenizer.ggml.scores must hold one score a token")
    types = listed(metadata, "tokenizer.ggml.token_type")
    unknown = next((t for t, kind in zip(vocabulary, types, strict=False) if kind == _UNKNOWN), None)
    merges = _merges_of_scores(vocabulary, scores)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return tokenizer


def _merges_of_scores(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores best; equal scores keep vocabulary order."""
    ranked: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right, (token[:cut], token[cut:])))
    return [pair for *_, pair in sorted(ranked)]


def _add_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Control tokens are special; user-defined ones are matched whole but stay visible text."""
    types = listed(metadata, "tokenizer.ggml.token_type")
    kinds = list(zip(tokens, types, strict=False))
    special = [AddedToken(t, normalized=False, special=True) for t, kind in kinds if kind in (_CONTROL, _UNKNOWN)]
    visible = [AddedToken(t, normalized=False, special=False) for t, kind in kinds if kind == _USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(visible)


def _add_bos(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], kind: str) -> None:
    """Prepends the beginning-of-sequence token where the file, or llama.cpp's default for the kind, says so."""
    default = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3
    sides = []
    for key, wanted in (("bos", default), ("eos", False)):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if (
            metadata.get(f"tokenizer.ggml.add_{key}_token", wanted)
            and isinstance(index, int)
            and 0 <= index < len(tokens)
        ):
            sides.append((key, tokens[index], index))
    if sides:
        parts = {key: f"{token}:0 " for key, token, _ in sides}
        single = f"{parts.get('bos', '')}$A:0 {parts.get('eos', '')}".strip()
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} $B:1", special_tokens=[(token, index) for _, token, index in sides]
        )


def gguf_eos_ids(metadata: Mapping[str, Any], vocab_size: int, where: str) -> tuple[int, ...]:
    """The file's eos, eot and eom ids, then control tokens that are known to end a turn or a text."""
    ids = []
    for key in (f"tokenizer.ggml.{name}" for name in _EOS_KEYS):
        index = metadata.get(key)
        if index is None:
            continue
        if type(index) is not int or not 0 <= index < vocab_size:
            raise ModelLoadError(f"{where}: {key} must be a token id from 0 to {vocab_size - 1}, not {index!r}")
        ids.append(index)
    tokens, types = listed(metadata, "tokenizer.ggml.tokens"), listed(metadata, "tokenizer.ggml.token_type")
    for token, kind, index in zip(tokens, types, range(vocab_size), strict=False):
        if kind == _CONTROL and token in _TURN_ENDS:
            ids.append(index)
    return tuple(dict.fromkeys(ids))
