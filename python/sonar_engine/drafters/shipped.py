"""Heads and draft models that come with the package, each for the one target whose weights have the recorded hash.

A folder in `HEADS`, as `sonar train fit` exports it, is all it takes. The command line drafts with it where no drafting
option is given; the engine does so only when `speculative.model` is `SHIPPED`. torch is imported for models alone that
might be another target than a known one: the server's process starts without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sonar_engine.config import HEAD_MODEL_TYPE, SHIPPED, EngineConfig, SpeculativeConfig
from sonar_engine.errors import ConfigError, ModelLoadError
from sonar_engine.files import read_json_file
from sonar_engine.models.registry import KNOWN_MODELS, ResolvedModel, resolve_model
from sonar_engine.training.identity import TRAINED_FOR, TargetIdentity, model_sha256

HEADS = Path(__file__).parents[1] / "heads"

Method = Literal["mtp", "draft_model"]
DraftLength = Literal["fixed", "adaptive"]
_KINDS: dict[Method, str] = {"mtp": "MTP head", "draft_model": "draft model"}


@dataclass(frozen=True)
class ShippedDrafter:
    """`num_steps` is the number of draft tokens that it was trained for."""

    folder: Path
    method: Method
    target: TargetIdentity
    num_steps: int


def list_shipped() -> list[ShippedDrafter]:
    """All that came with the package, heads before draft models.

    Raises StorageError or TrainingError for a folder that is damaged or does not tell its target.
    """
    folders = sorted(path.parent for path in HEADS.glob("*/config.json"))
    return sorted(map(_read, folders), key=lambda drafter: list(_KINDS).index(drafter.method))


def find_shipped(model: str, method: Method | None = None) -> ShippedDrafter | None:
    """The first for the model of this name or path, by the hash of its weights; `method`: of this kind alone.

    Nothing is fetched: a known model need not be here yet, and a hub id never has one.
    """
    return next((each for each in list_shipped() if method in (None, each.method) and _is_of(each, model)), None)


def resolve_drafter(name: str, target: str, method: Method) -> ResolvedModel:
    """The folder or file of `speculative.model`, for the target of that name or path.

    Raises ConfigError when it is `SHIPPED` and none came for the target, ModelLoadError when it cannot be found.
    """
    return ResolvedModel(_required(target, method).folder, "hf", name) if name == SHIPPED else resolve_model(name)


def with_shipped_drafter(config: EngineConfig, draft_length: DraftLength) -> EngineConfig:
    """The configuration with what came for its model, where no drafting is configured and there is such a thing.

    Where it is configured as `SHIPPED`, or not at all, `draft_length`, the number of drafts it was trained for and, for
    a head, look-ups beside it hold unless they were given. With a tokenizer from elsewhere nothing came for the model.
    Raises as `resolve_drafter`.
    """
    given = config.speculative
    if "speculative" not in config.model_fields_set:
        drafter = find_shipped(config.model) if config.tokenizer is None else None
    else:
        drafter = None
        if given.model == SHIPPED:  # else it is as configured
            drafter = _required(config.model, "mtp" if given.method == "mtp" else "draft_model")
    if drafter is None:
        return config
    own: dict[str, Any] = {"num_speculative_tokens": drafter.num_steps, "draft_length": draft_length}
    if drafter.method == "mtp":
        own["prompt_lookup"] = True
    named = {"method": drafter.method, "model": SHIPPED}
    speculative = SpeculativeConfig(**{**own, **given.model_dump(exclude_unset=True), **named})
    return config.model_copy(update={"speculative": speculative})


def shipped_line(config: EngineConfig) -> str | None:
    """What to say at the start of an engine that drafts with what came for its model; None for any other."""
    speculative = config.speculative
    if speculative.model != SHIPPED or speculative.method not in _KINDS:
        return None
    return (
        f"drafting with the {_KINDS[speculative.method]} that comes with Sonar Engine for {config.model}; "
        "--spec-method none turns it off"
    )


def _read(folder: Path) -> ShippedDrafter:
    where, made_by = folder / "config.json", "sonar train fit"
    raw = read_json_file(where, made_by)
    training = raw.get("training")
    num_steps = training.get("num_steps") if isinstance(training, Mapping) else None
    return ShippedDrafter(
        folder,
        "mtp" if raw.get("model_type") == HEAD_MODEL_TYPE else "draft_model",
        TargetIdentity.from_dict(raw.get(TRAINED_FOR), str(where)),
        num_steps if isinstance(num_steps, int) else SpeculativeConfig().num_speculative_tokens,
    )


def _required(model: str, method: Method) -> ShippedDrafter:
    found = find_shipped(model, method)
    if found is None:
        shipped = [each for each in list_shipped() if each.method == method]
        others = f"there are some for {', '.join(each.target.name for each in shipped)}" if shipped else "there is none"
        raise ConfigError(
            f"no {_KINDS[method]} for {model!r} comes with Sonar Engine ({others}); "
            "give a folder as the drafter's model (--spec-model), or none as the method (--spec-method)"
        )
    return found


def _is_of(drafter: ShippedDrafter, model: str) -> bool:
    target = drafter.target
    if model in KNOWN_MODELS:
        return KNOWN_MODELS[model].file_sha256 == target.sha256
    if not Path(model).expanduser().exists():
        return False
    try:
        path = resolve_model(model).path
        return _looks_like(target, path) and model_sha256(path) == target.sha256
    except ModelLoadError:
        return False  # the engine will say what is wrong with it


def _looks_like(target: TargetIdentity, path: Path) -> bool:
    """By what costs less than the hash of a large model."""
    known = next((each for each in KNOWN_MODELS.values() if each.file_sha256 == target.sha256), None)
    if known is not None:
        return path.is_file() and path.stat().st_size == known.file_size
    from sonar_engine.models.model_config import ModelConfig

    config = ModelConfig.load(path)
    return (config.hidden_size, config.vocab_size) == (target.hidden_size, target.vocab_size)
