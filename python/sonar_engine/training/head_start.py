"""What a head begins training with: another head, or parameters made from the target's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sonar_engine.drafters.mtp_checkpoint import load_head, read_head_config
from sonar_engine.drafters.mtp_config import HeadNorms, MtpConfig
from sonar_engine.drafters.mtp_head import MtpHead
from sonar_engine.errors import TrainingError
from sonar_engine.files import read_json_file
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.weights import Checkpoint, open_checkpoint
from sonar_engine.training.config import FitConfig
from sonar_engine.training.identity import TargetIdentity
from sonar_engine.training.shards import CapturedTexts
from sonar_engine.training.vocabulary import choose_vocabulary, count_answer_tokens

TRAINED_FOR = "trained_for"  # in a head's config.json: the identity of its target
COMMAND = "sonar train fit"


def start_head(
    config: FitConfig, target: ModelConfig, path: Path, texts: CapturedTexts, indices: Sequence[int]
) -> tuple[MtpHead, torch.Tensor | None]:
    """The head in fp32, and its token map int64 [W] (None: all ids). `path` is the target's, `indices` the texts
    that it will be trained on. Raises TrainingError or ModelLoadError."""
    if config.init_from is not None:
        return _from_head(config.init_from, target, path, texts.target)
    token_map = None
    if config.draft_vocab_size is not None and config.draft_vocab_size < target.vocab_size:
        token_map = choose_vocabulary(count_answer_tokens(texts, indices), config.draft_vocab_size).token_map
    norms = HeadNorms(**dict.fromkeys(config.without_norms, False))
    shape = MtpConfig.of_target(
        target,
        num_layers=config.num_layers,
        norms=norms,
        next_feature=config.next_feature,
        draft_vocab_size=None if token_map is None else len(token_map),
    )
    head = MtpHead(shape, max_positions=config.row_tokens + config.num_steps)
    head.reset_parameters(config.seed)
    if config.init != "random":
        _copy_last_layer(head, path, target)
    if config.init == "identity":
        _predict_as_the_target(head, path, target)
    return head, token_map


def _from_head(
    folder: Path, target: ModelConfig, path: Path, identity: TargetIdentity
) -> tuple[MtpHead, torch.Tensor | None]:
    check_head_target(folder, identity)
    files = read_head_config(folder)
    positions = files.config.block.max_position_embeddings
    loaded = load_head(files, path, target, max_positions=positions, dtype=torch.float32)
    return loaded.head, None if loaded.token_map is None else loaded.token_map.long()


def check_head_target(folder: Path, target: TargetIdentity) -> None:
    """Raises TrainingError for a head that was trained for another target; one that does not tell must only fit."""
    where = folder / "config.json"
    raw = read_json_file(where, COMMAND)
    if TRAINED_FOR in raw:
        target.check(TargetIdentity.from_dict(raw[TRAINED_FOR], str(where)), f"the head {folder}")
    block = read_head_config(folder).config.block
    if (block.hidden_size, block.vocab_size) != (target.hidden_size, target.vocab_size):
        raise TrainingError(
            f"the head {folder} is of another model: its hidden size and vocabulary are {block.hidden_size} and "
            f"{block.vocab_size}, the target's {target.hidden_size} and {target.vocab_size}"
        )


def _copy_last_layer(head: MtpHead, path: Path, target: ModelConfig) -> None:
    """Every layer of the head begins as the target's last one, the final norm as the target's."""
    last = f"model.layers.{target.num_layers - 1}."
    with torch.no_grad(), open_checkpoint(path, target) as checkpoint:
        for name, parameter in head.named_parameters():
            if name == "norm.weight":
                parameter.copy_(_read(checkpoint, "model.norm.weight"))
            elif name.startswith("layers."):
                parameter.copy_(_read(checkpoint, last + name.split(".", 2)[2]))


def _predict_as_the_target(head: MtpHead, path: Path, target: ModelConfig) -> None:
    """The layers add nothing, and the fusion undoes the gain of the target's final norm, which the head's own final
    norm puts back: so the first feature is the target's state, and its prediction that of the target at its position.
    """
    with torch.no_grad(), open_checkpoint(path, target) as checkpoint:
        gain = _read(checkpoint, "model.norm.weight").float()
        hidden = len(gain)
        for name, parameter in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif name == "eh_proj.weight":
                has_final = head.config.norms.final
                parameter.zero_()
                parameter[:, hidden:] = torch.diag(1 / gain) if has_final else torch.eye(hidden)


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return torch.cat([block for _, block in checkpoint.read(name)])
