"""MTP heads on disk: a folder of their own, or a layer behind the others in a target's checkpoint.

Their own: config.json (`MtpConfig.to_dict`) and model.safetensors with the names of `MtpConfig.shapes`, and, where
only some tokens can be drafted, `d2t` int64: the target's id of draft id i is i + d2t[i], as in EAGLE-3's checkpoints.

In a target's checkpoint (DeepSeek-V3's layout, config.json with `num_nextn_predict_layers`, here for dense layers of
the Llama family): `model.layers.{n}.` enorm, hnorm, eh_proj, shared_head.norm and the layer's own tensors, n being the
number of the target's layers. `mtp_next_feature` in config.json says what is fed back, "raw" unless given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file

from sonar_engine.config import HEAD_MODEL_TYPE
from sonar_engine.drafters.mtp_config import ARCHITECTURE, MtpConfig, NextFeature
from sonar_engine.drafters.mtp_head import MtpHead
from sonar_engine.errors import ModelLoadError
from sonar_engine.files import replacing, write_json
from sonar_engine.models.model_config import ModelConfig, read_json
from sonar_engine.models.safetensors_weights import SINGLE, SafetensorsCheckpoint
from sonar_engine.models.weights import (
    EMBEDDING,
    HEAD,
    Checkpoint,
    Shape,
    check_tensors,
    draft_head_prefix,
    open_checkpoint,
    read_whole,
)

CONFIG = "config.json"
ID_OFFSETS = "d2t"
# Copies of the target's matrices in DeepSeek's layout, by the head's name for them.
_COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}


@dataclass(frozen=True)
class HeadFiles:
    """A head's folder, its shape, and the prefix of its tensors' names, empty in a folder of its own."""

    folder: Path
    layout: Literal["own", "deepseek"]
    config: MtpConfig
    prefix: str = ""

    def name_of(self, parameter: str) -> str:
        """What the tensor of a parameter of `MtpConfig.shapes` is called in the folder."""
        if self.layout == "own":
            return parameter
        return self.prefix + (
            "shared_head.norm.weight" if parameter == "norm.weight" else parameter.removeprefix("layers.0.")
        )


def read_head_config(folder: Path) -> HeadFiles:
    """Recognises the layout. Raises ModelLoadError for a folder without a head, or with one that is not supported."""
    raw, where = read_json(folder / CONFIG), str(folder / CONFIG)
    if raw.get("architectures") == [ARCHITECTURE] or raw.get("model_type") == HEAD_MODEL_TYPE:
        return HeadFiles(folder, "own", MtpConfig.from_dict(raw, where))
    target = ModelConfig.from_dict(raw, where)
    if target.num_nextn_predict_layers != 1:
        raise ModelLoadError(
            f"{where}: method mtp needs a {ARCHITECTURE}, or a model with num_nextn_predict_layers 1, "
            f"and this is a {target.family} model with {target.num_nextn_predict_layers}"
        )
    next_feature = raw.get("mtp_next_feature", "raw")
    if next_feature not in get_args(NextFeature):
        raise ModelLoadError(f"{where}: mtp_next_feature must be 'normed' or 'raw', not {next_feature!r}")
    config = MtpConfig.of_target(target, next_feature=next_feature)
    return HeadFiles(folder, "deepseek", config, draft_head_prefix(target, 0))


@dataclass(frozen=True)
class LoadedHead:
    """`token_map` int32 [W]: the target's id of each draft id; None: all ids, in their order."""

    head: MtpHead
    token_map: torch.Tensor | None


def load_head(
    files: HeadFiles,
    target_path: Path,
    target: ModelConfig,
    *,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> LoadedHead:
    """Raises ModelLoadError that names missing, unknown and misshapen tensors, and ids that cannot be."""
    head = MtpHead(files.config, max_positions=max_positions, dtype=dtype, device=device)
    with SafetensorsCheckpoint(files.folder, frozenset({ID_OFFSETS})) as checkpoint:
        found = {name: shape for name, shape in checkpoint.shapes.items() if name.startswith(files.prefix)}
        check_tensors(*_expected(files), found, f"{files.folder}: tensors do not fit this MTP head")
        for name, parameter in head.named_parameters():
            _read_into(parameter.data, checkpoint, files.name_of(name))
        if files.layout == "deepseek":
            _check_copies(files, checkpoint, target_path, target)
        if files.config.draft_vocab_size is None:
            return LoadedHead(head, None)
        return LoadedHead(head, _token_map(files, read_whole(checkpoint, ID_OFFSETS)).to(device))


def save_head(head: MtpHead, folder: Path, token_map: torch.Tensor | None = None) -> None:
    """Writes a head's own folder, as `write_head` does."""
    write_head(head.config, head.parameters_for_saving(), folder, token_map)


def write_head(
    config: MtpConfig,
    parameters: Mapping[str, torch.Tensor],
    folder: Path,
    token_map: torch.Tensor | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Each file is written beside its place and then renamed.

    `parameters` as `MtpConfig.shapes` names them, on the CPU; `token_map` int [W] as in `LoadedHead`, W must be the
    configuration's `draft_vocab_size`; `facts` are further keys of config.json.
    """
    tensors = dict(parameters)
    num_ids = None if token_map is None else len(token_map)
    if num_ids != config.draft_vocab_size:
        raise ModelLoadError(f"draft_vocab_size is {config.draft_vocab_size}, and the token map has {num_ids} ids")
    if token_map is not None:
        tensors[ID_OFFSETS] = token_map.cpu().long() - torch.arange(len(token_map))
    with replacing(folder / SINGLE) as unfinished:
        save_file(tensors, unfinished, {"format": "pt"})
    dtype = next(iter(parameters.values())).dtype
    write_json(folder / CONFIG, {**config.to_dict(), "dtype": _dtype_name(dtype), **(facts or {})})


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _expected(files: HeadFiles) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Tensors that must be there, and tensors that may be."""
    config = files.config
    expected = {files.name_of(name): shape for name, shape in config.shapes().items()}
    if files.layout == "deepseek":
        matrix = (config.block.vocab_size, config.block.hidden_size)
        return expected, {files.prefix + name: matrix for name in _COPIES}
    if config.draft_vocab_size is not None:
        expected[ID_OFFSETS] = (config.draft_vocab_size,)
    return expected, {}


def _read_into(tensor: torch.Tensor, checkpoint: Checkpoint, name: str) -> None:
    for first, block in checkpoint.read(name):
        tensor[first : first + block.shape[0]].copy_(block)


def _token_map(files: HeadFiles, offsets: torch.Tensor) -> torch.Tensor:
    """int32 [W]"""
    ids = torch.arange(len(offsets)) + offsets
    vocab_size = files.config.block.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < len(ids):
        raise ModelLoadError(
            f"{files.folder}: {ID_OFFSETS} must give {len(ids)} different ids from 0 to {vocab_size - 1}, "
            f"and gives {len(ids.unique())} from {int(ids.min())} to {int(ids.max())}"
        )
    return ids.to(torch.int32)


def _check_copies(files: HeadFiles, checkpoint: Checkpoint, target_path: Path, target: ModelConfig) -> None:
    """A head has the target's embedding and output matrix; copies that differ belong to another head design."""
    copies: Mapping[str, str] = {
        files.prefix + name: EMBEDDING if target.tie_word_embeddings else original
        for name, original in _COPIES.items()
        if files.prefix + name in checkpoint.shapes
    }
    if not copies:
        return
    with open_checkpoint(target_path, target) as of_target:
        for name, original in copies.items():
            copy, matrix = read_whole(checkpoint, name), read_whole(of_target, original)
            if not torch.equal(copy, matrix.to(copy.dtype)):
                raise ModelLoadError(f"{files.folder}: {name} differs from the target's {original}; heads share it")
