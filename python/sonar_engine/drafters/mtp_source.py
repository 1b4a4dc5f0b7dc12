"""The MTP head that drafts for a target, found and checked before any weight is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sonar_engine.config import SHIPPED
from sonar_engine.drafters.mtp_checkpoint import HeadFiles, read_head_config
from sonar_engine.drafters.shipped import resolve_drafter
from sonar_engine.errors import ConfigError
from sonar_engine.kv_cache import bytes_per_token
from sonar_engine.model_runner import choose_dtype, choose_max_model_len
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.registry import ResolvedModel
from sonar_engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sonar_engine.config import EngineConfig


def find_head(engine_config: EngineConfig, target_model: ResolvedModel) -> HeadFiles:
    """The head in `speculative.model`, or, where none is named, in the target's own folder.

    Raises ModelLoadError when there is none that can be read, ConfigError when it is another model's.
    """
    named = engine_config.speculative.model
    resolved = target_model if named is None else resolve_drafter(named, engine_config.model, "mtp")
    if resolved.kind != "hf":
        raise ConfigError(
            f"method mtp needs a head, and {resolved.name!r} is a .gguf file; give a head's folder as model, "
            f"or {SHIPPED!r} for one that comes with Sonar Engine"
        )
    files = read_head_config(resolved.path)
    target = ModelConfig.load(target_model.path)
    _check_fit(files, resolved.name, engine_config, target)
    return files


def head_kv_bytes_per_token(engine_config: EngineConfig, target: ResolvedModel, tokenizer: Tokenizer) -> int:
    """What the head's keys and values take; raises as `find_head` does."""
    files = find_head(engine_config, target)
    return bytes_per_token(files.config.block, choose_dtype(engine_config, ModelConfig.load(target.path)))


def _check_fit(files: HeadFiles, name: str, engine_config: EngineConfig, target: ModelConfig) -> None:
    block = files.config.block
    for what in ("hidden_size", "vocab_size"):
        if getattr(block, what) != getattr(target, what):
            raise ConfigError(
                f"the head {name!r} is of another model: its {what} is {getattr(block, what)}, "
                f"the target's {getattr(target, what)}; take a head that was trained for this target"
            )
    max_model_len = choose_max_model_len(engine_config, target)
    if block.max_position_embeddings < max_model_len:
        raise ConfigError(
            f"the head {name!r} has {block.max_position_embeddings} positions, below max_model_len={max_model_len}; "
            f"set max_model_len to at most {block.max_position_embeddings}"
        )
    dtype = choose_dtype(engine_config, target)
    if engine_config.speculative.dtype not in ("auto", str(dtype).removeprefix("torch.")):
        raise ConfigError(
            f"method mtp computes in the target's {str(dtype).removeprefix('torch.')}, "
            f"not in {engine_config.speculative.dtype}; leave the draft's dtype at auto"
        )
