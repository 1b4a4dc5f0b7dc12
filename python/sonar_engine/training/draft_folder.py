"""A trained draft model as a Hugging Face folder: configuration, bf16 weights, tokenizer, and a note on licence and
data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sonar_engine.files import replacing, write_json
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.safetensors_weights import SINGLE
from sonar_engine.models.weights import EMBEDDING, HEAD
from sonar_engine.tokenizer import Tokenizer
from sonar_engine.training.export_note import write_note
from sonar_engine.training.identity import TRAINED_FOR, TargetIdentity

_OPENING = """# Draft model for {name}

A draft model for speculative decoding with Sonar Engine, for this target alone:

```bash
sonar serve {name} --spec-method draft_model --spec-model FOLDER --num-speculative-tokens {num_steps}
```

{num_layers} layers, which began as those of the target ({layers}), between the target's embedding and output matrix.
"""


@dataclass(frozen=True)
class TrainedDraft:
    """`parameters` as `DraftLayers` names them; `embedding` and `output` [V, H] are the target's."""

    config: ModelConfig
    parameters: Mapping[str, torch.Tensor]
    embedding: torch.Tensor
    output: torch.Tensor
    tokenizer: Tokenizer


def export_draft(folder: Path, draft: TrainedDraft, target: TargetIdentity, facts: Mapping[str, Any]) -> None:
    """Each file is written beside its place and then renamed.

    `facts`: num_steps, layers, and those of `write_note`; they go into the configuration and the note.
    """
    target = target.without_folder()
    tensors = {EMBEDDING: draft.embedding, **{f"model.{name}": value for name, value in draft.parameters.items()}}
    if not draft.config.tie_word_embeddings:
        tensors[HEAD] = draft.output
    half = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    with replacing(folder / SINGLE) as part:
        save_file(half, part, {"format": "pt"})
    _write_tokenizer(folder, draft.tokenizer)
    config = replace(draft.config, torch_dtype=torch.bfloat16)
    described = {TRAINED_FOR: target.to_dict(), "training": dict(facts)}
    write_json(folder / "config.json", {**config.to_dict(), **described})
    layers = ", ".join(map(str, facts["layers"])) or "by way of another draft"
    opening = _OPENING.format(name=target.name, num_layers=config.num_layers, **{**facts, "layers": layers})
    write_note(folder, opening, target, facts)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """In the files that transformers has for any tokenizer of the `tokenizers` library, wherever it came from."""
    with replacing(folder / "tokenizer.json") as part:
        part.write_text(tokenizer.raw.to_str(pretty=True), encoding="utf-8")
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    templates = [{"name": name, "template": text} for name, text in tokenizer.chat_template_sources.items()]
    if templates:
        only = len(templates) == 1 and templates[0]["name"] == "default"
        described["chat_template"] = templates[0]["template"] if only else templates
    write_json(folder / "tokenizer_config.json", described)
