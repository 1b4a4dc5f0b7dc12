"""Text to token ids and back, and chat messages to prompts, from a model folder or a GGUF file.

Everything goes through one `tokenizers.Tokenizer`; neither torch nor (but for folders without tokenizer.json)
transformers is imported, so that the server's process starts within a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from sonar_engine.chat_template import ChatTemplate
from sonar_engine.detokenizer import byte_level_token, is_byte_level
from sonar_engine.errors import InvalidRequestError, ModelLoadError, TokenizerMissingError
from sonar_engine.models.registry import ResolvedModel

_SPECIAL_NAMES = ("bos", "eos", "unk", "pad")
_GGUF_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPACE = "\u2581"


class Tokenizer:
    """Safe to use from several threads. Ids are below `vocab_size`, which may be less than the model's width."""

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int] = (),
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        """`special_tokens` maps bos_token, eos_token, unk_token, pad_token to their text, where they exist."""
        raw.no_padding()
        raw.no_truncation()
        self.raw = raw
        self.special_tokens = dict(special_tokens)
        eos = raw.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([i for i in (eos, *eos_token_ids) if i is not None]))
        self._template = None if not chat_template else ChatTemplate(chat_template, special_tokens)
        self._byte_level = is_byte_level(raw)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self.raw.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of text."""
        return frozenset(i for i, token in self.raw.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def max_token_chars(self) -> int | None:
        """The most characters of a text that one token stands for; None where the vocabulary does not tell."""
        swallows_space = any(token.lstrip or token.rstrip for token in self.raw.get_added_tokens_decoder().values())
        if not self._byte_level or self.raw.normalizer is not None or swallows_space:
            return None
        return max(map(len, self.raw.get_vocab(with_added_tokens=True)), default=None)

    @property
    def bos_token_id(self) -> int | None:
        return self.raw.token_to_id(self.special_tokens["bos_token"]) if "bos_token" in self.special_tokens else None

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template_sources(self) -> dict[str, str]:
        """The chat templates by name; none where the model has none."""
        return {} if self._template is None else self._template.sources

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with `add_special_tokens` also what the model puts around a text (a BOS, for some)."""
        try:
            # As `encode`, without offsets; and a batch, even of one, lets other threads run.
            return self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequestError("text must be valid Unicode without lone surrogates", "prompt") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these ids; an id without a token is nothing."""
        try:
            return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise InvalidRequestError("token ids must be whole numbers from 0 to 4294967295", "tokens") from None

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Each id's entry of the vocabulary as spelled there, None where there is none."""
        return [self.raw.id_to_token(i) for i in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text: maybe part of a character; empty for an id without a token."""
        if self._byte_level:
            return byte_level_token(self.raw, token_id)
        token = self.raw.id_to_token(token_id) or ""
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace(_SPACE, " ").encode()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt's text by the model's chat template; `kwargs` are further variables of the template."""
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template, so it cannot chat; use a text completion instead", "messages"
            )
        return self._template.render(messages, tools, add_generation_prompt, continue_final_message, kwargs)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of `render_chat`'s text. The template itself writes any BOS."""
        text = self.render_chat(messages, tools, add_generation_prompt, continue_final_message, **kwargs)
        return self.encode(text, add_special_tokens=False)


def load_tokenizer(resolved: ResolvedModel) -> Tokenizer:
    """The tokenizer that belongs to a model. Raises ModelLoadError if it is missing, damaged or not supported."""
    if resolved.kind == "gguf":
        return _from_gguf(resolved.path)
    return _from_folder(resolved.path)


def _from_gguf(path: Path) -> Tokenizer:
    from sonar_engine.models.gguf_file import GgufFile
    from sonar_engine.models.gguf_tokenizer import build_tokenizer, gguf_eos_ids

    with GgufFile(path) as file:
        metadata = file.metadata
    raw = build_tokenizer(metadata, str(path))
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {}
    for name in _SPECIAL_NAMES:
        index = metadata.get(f"tokenizer.ggml.{_GGUF_NAMES[name]}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            special[f"{name}_token"] = tokens[index]
    return Tokenizer(
        raw,
        special_tokens=special,
        eos_token_ids=gguf_eos_ids(metadata, len(tokens), str(path)),
        chat_template=_templates_of_gguf(metadata, str(path)),
    )


def _templates_of_gguf(metadata: Mapping[str, Any], where: str) -> dict[str, str]:
    """The default template and the named ones (`tokenizer.chat_template.tool_use`)."""
    prefix = "tokenizer.chat_template"
    found = {key: text for key, text in metadata.items() if key == prefix or key.startswith(f"{prefix}.")}
    for key, text in found.items():
        if not isinstance(text, str):
            raise ModelLoadError(f"{where}: {key} must be text, not {type(text).__name__}")
    return {key[len(prefix) + 1 :] or "default": text for key, text in found.items()}


def _from_folder(folder: Path) -> Tokenizer:
    config = _optional_json(folder / "tokenizer_config.json")
    raw, defaults = _raw_of_folder(folder)
    named = {**defaults, **_optional_json(folder / "special_tokens_map.json"), **config}
    special = {
        f"{name}_token": text
        for name in _SPECIAL_NAMES
        if (text := _token_text(named.get(f"{name}_token"))) is not None
    }
    eos_ids = [*_eos_ids(folder / "generation_config.json"), *_eos_ids(folder / "config.json")]
    return Tokenizer(
        raw, special_tokens=special, eos_token_ids=eos_ids, chat_template=_template_of_folder(folder, config)
    )


def _eos_ids(path: Path) -> list[int]:
    value = _optional_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(index) is int for index in ids):
        raise ModelLoadError(f"{path}: eos_token_id must be a token id or a list of them, not {value!r}")
    return ids


def _raw_of_folder(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer, and the special tokens that its class has by default (for older formats alone)."""
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            return tokenizers.Tokenizer.from_file(str(path)), {}
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ModelLoadError(f"{path} is damaged or of an unknown version: {error}; fetch it again") from None
    if not any((folder / name).exists() for name in ("tokenizer.model", "vocab.json", "tekken.json")):
        raise TokenizerMissingError(
            f"{folder} has no tokenizer.json; give the tokenizer's folder with the option `tokenizer`"
        )
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return converted.backend_tokenizer, dict(converted.special_tokens_map)
    except Exception as error:  # converters raise what they like
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            f"{folder} has no tokenizer.json and its vocabulary cannot be converted: {reason}"
        ) from None


def _template_of_folder(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """chat_template.jinja, else the entry of tokenizer_config.json: one text, or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{path} cannot be read as text: {error}; fetch it again") from None
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    if not isinstance(template, list) or not all(_is_named_template(entry) for entry in template):
        raise ModelLoadError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be text, or a list of objects "
            "with name and template, both text"
        )
    return {entry["name"]: entry["template"] for entry in template}


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _token_text(entry: Any) -> str | None:
    """A special token is its text, or an object with `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}; fetch it again") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(value).__name__}; fetch it again")
    return value
