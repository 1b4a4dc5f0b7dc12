"""What an MTP head is made of: a block of the target's family behind a fusion of token and feature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from sonar_engine.config import HEAD_MODEL_TYPE
from sonar_engine.errors import ModelLoadError
from sonar_engine.models.model_config import JsonFields, ModelConfig
from sonar_engine.models.weights import Shape, layer_shapes

ARCHITECTURE = "SonarMtpHead"
NextFeature = Literal["normed", "raw"]
_OWN_KEYS = ("block_type", "draft_vocab_size", "norms", "fusion_bias", "next_feature")


@dataclass(frozen=True)
class HeadNorms:
    """Which RMSNorms a head has; without one, the values go on as they are."""

    embedding: bool = True  # N_e
    feature: bool = True  # N_h
    input: bool = True  # N_in, in every layer
    post_attention: bool = True  # N_post, in every layer
    final: bool = True  # N_f


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """A head's shape. `block` has the head's layers and the target's `hidden_size` and `vocab_size`.

    `next_feature` is what a further draft of the same step takes for the target's hidden state: the states behind the
    last layer after the final norm, or before it. `draft_vocab_size` tokens can be drafted; None: all.
    """

    block: ModelConfig
    norms: HeadNorms = field(default_factory=HeadNorms)
    fusion_bias: bool = False
    next_feature: NextFeature = "normed"
    draft_vocab_size: int | None = None

    @classmethod
    def of_target(cls, target: ModelConfig, num_layers: int = 1, **options: Any) -> MtpConfig:
        """A head of layers like the target's last one; `options` are further fields."""
        windows = (target.layer_windows[-1],) * num_layers
        block = replace(
            target,
            num_layers=num_layers,
            layer_windows=windows,
            num_nextn_predict_layers=0,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_ids=(),
            generation_defaults={},
        )
        return cls(block=block, **options)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str) -> MtpConfig:
        """From config.json of a head; raises ModelLoadError that names `where` and the key."""
        get = JsonFields(raw, where)
        block = {key: value for key, value in raw.items() if key not in (*_OWN_KEYS, "architectures")}
        next_feature = raw.get("next_feature", "normed")
        if next_feature not in get_args(NextFeature):
            raise ModelLoadError(f"{where}: next_feature must be 'normed' or 'raw', not {next_feature!r}")
        config = cls(
            block=ModelConfig.from_dict({**block, "model_type": raw.get("block_type", "llama")}, where),
            norms=_norms(raw.get("norms", {}), where),
            fusion_bias=get.flag("fusion_bias"),
            next_feature=next_feature,
            draft_vocab_size=None if raw.get("draft_vocab_size") is None else get.integer("draft_vocab_size"),
        )
        if config.num_draft_ids > config.block.vocab_size:
            raise ModelLoadError(
                f"{where}: draft_vocab_size {config.draft_vocab_size} is above vocab_size {config.block.vocab_size}"
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds; `from_dict` reads it back."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": HEAD_MODEL_TYPE,
            "block_type": self.block.family,
            **self.block.layers_dict(),
            "draft_vocab_size": self.draft_vocab_size,
            "norms": asdict(self.norms),
            "fusion_bias": self.fusion_bias,
            "next_feature": self.next_feature,
        }

    @property
    def num_draft_ids(self) -> int:
        """Tokens that can be drafted."""
        return self.block.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    def shapes(self) -> dict[str, Shape]:
        """Every parameter of the head. Embedding and output matrix are the target's."""
        hidden, norms = self.block.hidden_size, self.norms
        shapes: dict[str, Shape] = {"eh_proj.weight": (hidden, 2 * hidden)}
        if self.fusion_bias:
            shapes["eh_proj.bias"] = (hidden,)
        shapes |= {name: (hidden,) for name, has in _outer_norms(norms).items() if has}
        left_out = {
            "input_layernorm.weight": not norms.input,
            "post_attention_layernorm.weight": not norms.post_attention,
        }
        layer = {name: shape for name, shape in layer_shapes(self.block).items() if not left_out.get(name)}
        for index in range(self.block.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes


def _outer_norms(norms: HeadNorms) -> dict[str, bool]:
    return {"enorm.weight": norms.embedding, "hnorm.weight": norms.feature, "norm.weight": norms.final}


def _norms(raw: Any, where: str) -> HeadNorms:
    known = [norm.name for norm in fields(HeadNorms)]
    if not isinstance(raw, dict) or not all(isinstance(value, bool) for value in raw.values()):
        raise ModelLoadError(f"{where}: norms must be an object of true and false, not {raw!r}")
    unknown = sorted(set(raw) - set(known))
    if unknown:
        raise ModelLoadError(f"{where}: norms has no {unknown[0]!r}; it has {', '.join(known)}")
    return HeadNorms(**raw)
