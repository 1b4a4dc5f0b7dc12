"""A trained head as a folder that serves: configuration, bf16 weights, and a note on licence and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sonar_engine.drafters.mtp_checkpoint import write_head
from sonar_engine.drafters.mtp_config import MtpConfig
from sonar_engine.training.export_note import write_note
from sonar_engine.training.identity import TRAINED_FOR, TargetIdentity

_OPENING = """# MTP head for {name}

A draft head for speculative decoding with Sonar Engine, for this target alone:

```bash
sonar serve {name} --spec-method mtp --spec-model FOLDER --num-speculative-tokens {num_steps}
```

Drafted ids: {num_ids:,} of {vocab_size:,}, which are {coverage:.2%} of the answers' tokens.
"""


@dataclass(frozen=True)
class TrainedHead:
    """`parameters` on the CPU, as `MtpConfig.shapes` names them; `token_map` int64 [W], None: all ids."""

    config: MtpConfig
    parameters: Mapping[str, torch.Tensor]
    token_map: torch.Tensor | None


def export_head(folder: Path, head: TrainedHead, target: TargetIdentity, facts: Mapping[str, Any]) -> None:
    """`facts`: num_steps, coverage, and those of `write_note`; they go into the configuration and the note."""
    target = target.without_folder()
    weights = {name: value.to(torch.bfloat16) for name, value in head.parameters.items()}
    described = {TRAINED_FOR: target.to_dict(), "training": dict(facts)}
    write_head(head.config, weights, folder, head.token_map, described)
    num_ids, vocab_size = head.config.num_draft_ids, head.config.block.vocab_size
    opening = _OPENING.format(name=target.name, num_ids=num_ids, vocab_size=vocab_size, **facts)
    write_note(folder, opening, target, facts)
