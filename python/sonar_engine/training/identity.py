"""Which target texts, states and heads belong to: hashes, so that a mix-up is an error and not a poor head.

torch is imported on use: the server asks which drafter comes for its model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from sonar_engine.errors import TrainingError
from sonar_engine.files import read_json_file, sha256_of_bytes
from sonar_engine.models.registry import ResolvedModel, is_hub_id, sha256_of
from sonar_engine.tokenizer import Tokenizer

_COMMAND = "sonar train fit"
TRAINED_FOR = "trained_for"  # in the config.json of a head or draft: the identity of its target
_WHAT = {
    "sha256": "weights",
    "tokenizer_sha256": "tokenizer",
    "template_sha256": "chat template",
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary",
}


@dataclass(frozen=True)
class TargetIdentity:
    """Hashes are sha256 in hex: of the model's files, of its tokenizer and of its chat templates."""

    name: str
    sha256: str
    tokenizer_sha256: str
    template_sha256: str
    hidden_size: int
    vocab_size: int

    @classmethod
    def of(cls, resolved: ResolvedModel, tokenizer: Tokenizer) -> TargetIdentity:
        from sonar_engine.models.model_config import ModelConfig

        config = ModelConfig.load(resolved.path)
        return cls(
            name=resolved.name,
            sha256=model_sha256(resolved.path),
            tokenizer_sha256=sha256_of_bytes(tokenizer.raw.to_str().encode()),
            template_sha256=sha256_of_bytes(json.dumps(tokenizer.chat_template_sources, sort_keys=True).encode()),
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
        )

    @classmethod
    def from_dict(cls, raw: Any, where: str) -> TargetIdentity:
        names = {field.name for field in fields(cls)}
        if not isinstance(raw, Mapping) or set(raw) != names:
            raise TrainingError(f"{where}: target must have {', '.join(sorted(names))}; make the file again")
        return cls(**raw)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def without_folder(self) -> TargetIdentity:
        """For what is passed on: a local model's name is its last part, which tells nothing of the machine."""
        return self if is_hub_id(self.name) else replace(self, name=Path(self.name).name)

    def check(self, recorded: TargetIdentity, where: str) -> None:
        """Raises TrainingError unless what `where` holds is of this target."""
        differing = [what for field, what in _WHAT.items() if getattr(self, field) != getattr(recorded, field)]
        if differing:
            raise TrainingError(
                f"{where} belongs to another target ({recorded.name!r}): its {' and '.join(differing)} "
                f"differ from those of {self.name!r}; give the model it was made with, or make it again"
            )


def is_draft(folder: Path) -> bool:
    """Whether `folder` holds a model rather than a head. Raises StorageError where there is no configuration."""
    from sonar_engine.models.model_config import SUPPORTED_FAMILIES

    raw = read_json_file(folder / "config.json", _COMMAND)
    return raw.get("model_type") in SUPPORTED_FAMILIES and not raw.get("num_nextn_predict_layers")


def check_trained_for(folder: Path, kind: str, target: TargetIdentity) -> bool:
    """Whether the head or draft in `folder` tells what it was trained for; raises TrainingError for another target."""
    where = folder / "config.json"
    raw = read_json_file(where, _COMMAND)
    if TRAINED_FOR not in raw:
        return False
    target.check(TargetIdentity.from_dict(raw[TRAINED_FOR], str(where)), f"the {kind} {folder}")
    return True


def model_sha256(path: Path) -> str:
    """Of a .gguf file; of a folder, over its configuration and weights, by name."""
    if path.is_file():
        return sha256_of(path)
    files = sorted({path / "config.json", *path.glob("*.safetensors")})
    listing = [f"{file.name} {sha256_of(file)}" for file in files if file.exists()]
    return sha256_of_bytes("\n".join(listing).encode())
