"""What a head begins training with: another head, or parameters made from the target's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sonar_engine.drafters.mtp_checkpoint import load_head, read_head_config
from sonar_engine.drafters.mtp_config import HeadNorms, MtpConfig
from sonar_engine.drafters.mtp_head import MtpHead
from sonar_engine.errors import TrainingError
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.weights import load_embedding, open_checkpoint, read_whole
from sonar_engine.training.config import FitConfig
from sonar_engine.training.identity import TargetIdentity, check_trained_for
from sonar_engine.training.shards import CapturedTexts
from sonar_engine.training.vocabulary import choose_vocabulary, count_answer_tokens

_REGRESSION_TOKENS = 200_000
_RIDGE = 1e-3  # of the inputs' mean square
_LEAST_GAIN = 0.2  # of the gains' root mean square


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
    if config.init == "copy":
        _copy_last_layer(head, path, target)
    if config.init == "regression":
        _foresee_the_next_state(head, path, target, texts, indices)
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
    check_trained_for(folder, "head", target)
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
                parameter.copy_(read_whole(checkpoint, "model.norm.weight"))
            elif name.startswith("layers."):
                parameter.copy_(read_whole(checkpoint, last + name.split(".", 2)[2]))


def _foresee_the_next_state(
    head: MtpHead, path: Path, target: ModelConfig, texts: CapturedTexts, indices: Sequence[int]
) -> None:
    """The layers add nothing at first, and the fusion is the ridge regression of the target's next state.

    Their other matrices stay random: the large activations of the target's last layer would turn the first steps of
    an optimiser that moves all weights alike into a leap.
    What the final norm multiplies by is divided out of the states, so that the first feature is near the state that it
    stands for, and so are those that the head feeds back.
    """
    with open_checkpoint(path, target) as checkpoint:
        gain = read_whole(checkpoint, "model.norm.weight").float()
    embedding = load_embedding(path, target, texts.dtype, "cpu")
    least = _LEAST_GAIN * float(gain.pow(2).mean().sqrt())
    gain = torch.where(gain < 0, -1.0, 1.0) * gain.abs().clamp(min=least)  # an entry near 0 tells nothing of the state
    size, norms, eps = 2 * target.hidden_size, head.config.norms, target.rms_norm_eps
    gram, moments = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, size // 2, dtype=torch.float64)
    num_tokens = 0
    for index in indices:
        first, hidden = max(texts.prompt_lens[index] - 1, 0), texts.hidden(index).float()
        if len(hidden) < first + 3 or num_tokens >= _REGRESSION_TOKENS:
            continue
        following = embedding[texts.tokens(index)[first + 1 : -1].long()].float()
        inputs = torch.cat(
            (_normed(following, norms.embedding, eps), _normed(hidden[first:-2], norms.feature, eps)), dim=1
        )
        wanted = hidden[first + 1 : -1] / gain if norms.final else hidden[first + 1 : -1]
        gram += inputs.T @ inputs
        moments += inputs.T @ wanted
        num_tokens += len(inputs)
    ridge = _RIDGE * gram.diagonal().mean().clamp(min=1e-9) * torch.eye(size, dtype=torch.float64)
    fusion = torch.linalg.solve(gram + ridge, moments).T
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif name == "eh_proj.weight":
                parameter.copy_(fusion)
            elif name == "norm.weight":
                parameter.copy_(gain)


def _normed(x: torch.Tensor, has_norm: bool, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) if has_norm else x
