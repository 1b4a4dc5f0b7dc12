"""Random MTP heads for tiny targets, and what such a head gives over a whole sequence, computed without pages."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sonar_engine.drafters.mtp_checkpoint import save_head
from sonar_engine.drafters.mtp_config import HeadNorms, MtpConfig
from sonar_engine.drafters.mtp_head import MtpHead
from sonar_engine.models.model_config import ModelConfig
from tiny_models import make_tiny

WINDOW = 7  # tokens that a layer of `make_copied_head` sees


def make_head(
    target: Path, folder: Path, *, seed: int = 0, token_map: torch.Tensor | None = None, **fields: Any
) -> Path:
    """Saves a random head for the model in `target` and returns its folder; `fields` as for `MtpConfig.of_target`."""
    num_ids = None if token_map is None else len(token_map)
    config = MtpConfig.of_target(ModelConfig.load(target), draft_vocab_size=num_ids, **fields)
    save_head(random_head(config, seed), folder, token_map)
    return folder


def random_head(config: MtpConfig, seed: int = 0) -> MtpHead:
    """Parameters wide enough that attention is peaked and no two argmaxes tie."""
    head = MtpHead(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = name.endswith("norm.weight")
            scale = 1.5 / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 0.2
            parameter.copy_(1 + 0.2 * noise if is_norm else scale * noise)
    return head


@dataclass
class WholeSequence:
    """A head's attention over one sequence, packed, without pages; keeps each layer's keys and values [T, Hkv, D]."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        del self.keys[layer:], self.values[layer:]
        self.keys.append(k.clone())
        self.values.append(v.clone())
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
        )
        return out.transpose(0, 1).flatten(1)


def make_copied_head(
    folder: Path, *, token_map: torch.Tensor | None = None, noise: float = 0.0, **overrides: Any
) -> tuple[Path, Path]:
    """Saves a target of one windowed layer, and a head that is a copy of that layer over the next token's embedding.

    Behind the first `WINDOW` tokens both see the same tokens, so that the head is always right, but for the `noise`
    on its matrices. `overrides` as for `make_tiny`.
    """
    shape = {"num_hidden_layers": 1, "sliding_window": WINDOW, **overrides}
    target = make_tiny("mistral_window", folder / "target", tokenizer=shape.get("vocab_size", 320) == 320, **shape)
    weights = load_file(target / "model.safetensors")
    config = MtpConfig.of_target(
        ModelConfig.load(target),
        norms=HeadNorms(embedding=False, feature=False),
        draft_vocab_size=None if token_map is None else len(token_map),
    )
    head, hidden_size = random_head(config), config.block.hidden_size
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name == "eh_proj.weight":
                parameter.copy_(torch.eye(hidden_size, 2 * hidden_size))
            else:
                parameter.mul_(noise if parameter.dim() == 2 else 0).add_(weights[f"model.{name}"])
    save_head(head, folder / "head", token_map)
    return target, folder / "head"


def to_deepseek_layout(target: Path, head: Path, folder: Path) -> Path:
    """A copy of the target's checkpoint with the head as a layer behind the others, as DeepSeek-V3 has it."""
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    next_feature = json.loads((head / "config.json").read_text())["next_feature"]
    config |= {"num_nextn_predict_layers": 1, "mtp_next_feature": next_feature}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{config['num_hidden_layers']}."
    for name, tensor in load_file(head / "model.safetensors").items():
        own = "shared_head.norm.weight" if name == "norm.weight" else name.removeprefix("layers.0.")
        weights[prefix + own] = tensor
    weights[prefix + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
