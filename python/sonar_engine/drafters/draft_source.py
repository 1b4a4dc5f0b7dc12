"""Which model drafts, found and checked before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sonar_engine.drafters.shipped import resolve_drafter
from sonar_engine.errors import ConfigError, TokenizerMissingError
from sonar_engine.kv_cache import bytes_per_token
from sonar_engine.model_runner import choose_dtype, choose_max_model_len
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.registry import ResolvedModel
from sonar_engine.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from sonar_engine.config import EngineConfig

_NAMED_AT_MOST = 5  # ids spelled out in one error


@dataclass(frozen=True)
class DraftSource:
    """A draft model on this machine. `engine_config` is the engine's with the draft's own model and dtype."""

    resolved: ResolvedModel
    config: ModelConfig
    engine_config: EngineConfig


def find_draft(engine_config: EngineConfig) -> DraftSource:
    """Raises ConfigError when `speculative.model` is missing, ModelLoadError when it cannot be found or read."""
    speculative = engine_config.speculative
    if speculative.model is None:
        raise ConfigError("speculative method 'draft_model' needs a model: a known name, folder, .gguf file or hub id")
    resolved = resolve_drafter(speculative.model, engine_config.model, "draft_model")
    dtype = engine_config.dtype if speculative.dtype == "auto" else speculative.dtype
    own = engine_config.model_copy(update={"model": str(resolved.path), "dtype": dtype})
    return DraftSource(resolved, ModelConfig.load(resolved.path), own)


def check_draft(draft: DraftSource, target: ModelConfig, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Raises ConfigError when the draft cannot serve this target: other token ids, or too few positions."""
    limit = draft.config.max_position_embeddings
    if limit < max_model_len:
        raise ConfigError(
            f"draft model {draft.resolved.name!r} has {limit} positions, below max_model_len={max_model_len}; "
            f"set max_model_len to at most {limit} or take another draft model"
        )
    difference = _vocabulary_difference(draft, target, tokenizer)
    if difference is not None:
        raise ConfigError(
            f"draft model {draft.resolved.name!r} has another vocabulary than the target: {difference}; "
            "take a draft model of the target's family"
        )


def draft_kv_bytes_per_token(engine_config: EngineConfig, target: ResolvedModel, tokenizer: Tokenizer) -> int:
    """What the draft's keys and values take; raises as `find_draft` and `check_draft` do."""
    draft, target_config = find_draft(engine_config), ModelConfig.load(target.path)
    check_draft(draft, target_config, tokenizer, choose_max_model_len(engine_config, target_config))
    return bytes_per_token(draft.config, choose_dtype(draft.engine_config, draft.config))


def _vocabulary_difference(draft: DraftSource, target: ModelConfig, tokenizer: Tokenizer) -> str | None:
    """In words, or None. Without a tokenizer of the draft's the widths of the logits must agree."""
    try:
        own = load_tokenizer(draft.resolved)
    except TokenizerMissingError:
        if draft.config.vocab_size == target.vocab_size:
            return None
        return f"its logits have {draft.config.vocab_size} entries, the target's {target.vocab_size}"
    return vocabulary_difference(own, tokenizer)


def vocabulary_difference(draft: Tokenizer, target: Tokenizer) -> str | None:
    """The ids that stand for different tokens, spelled out up to a few; None when there are none."""
    of_draft, of_target = _by_id(draft), _by_id(target)
    ids = sorted(i for i in of_draft.keys() | of_target.keys() if of_draft.get(i) != of_target.get(i))
    if not ids:
        return None
    named = ", ".join(f"{i} ({of_draft.get(i)!r}, not {of_target.get(i)!r})" for i in ids[:_NAMED_AT_MOST])
    return f"{len(ids)} ids differ: {named}{', ...' if len(ids) > _NAMED_AT_MOST else ''}"


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {index: token for token, index in tokenizer.raw.get_vocab(with_added_tokens=True).items()}
