"""What a draft model begins training with: layers of the target, or another draft."""

from __future__ import annotations

from pathlib import Path

import torch

from sonar_engine.errors import ConfigError, TrainingError
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.weights import open_checkpoint, read_whole
from sonar_engine.training.draft_trainer import DraftLayers, some_layers
from sonar_engine.training.identity import TargetIdentity, check_trained_for


def chosen_layers(layers: tuple[int, ...], num_layers: int, target: ModelConfig) -> tuple[int, ...]:
    """`layers`, or without any `num_layers` (at least 2) evenly spaced ones, the first and the last among them.

    Raises ConfigError for those that the target does not have.
    """
    last = target.num_layers - 1
    if layers and layers[-1] > last:
        raise ConfigError(f"layers: {layers[-1]} is no layer of the target, whose layers are 0 to {last}")
    if not layers and num_layers > target.num_layers:
        raise ConfigError(f"num_layers: the target has {target.num_layers} layers, so a draft has at most as many")
    # Whole numbers alone, halves up, so that the choice is the same everywhere.
    return layers or tuple((2 * i * last + num_layers - 1) // (2 * (num_layers - 1)) for i in range(num_layers))


def read_layers(path: Path, model: ModelConfig, layers: tuple[int, ...], max_positions: int) -> DraftLayers:
    """`layers` of the model in `path`, ascending and all there, and its final norm, in fp32."""
    draft = DraftLayers(some_layers(model, layers), max_positions)
    with torch.no_grad(), open_checkpoint(path, model) as checkpoint:
        for name, parameter in draft.named_parameters():
            group, *rest = name.split(".", 2)
            own = name if group == "norm" else f"layers.{layers[int(rest[0])]}.{rest[1]}"
            parameter.copy_(read_whole(checkpoint, f"model.{own}"))
    return draft


def layers_of_draft(folder: Path, target: TargetIdentity, max_positions: int) -> DraftLayers:
    """All layers of a draft that was trained for this target. Raises TrainingError or ModelLoadError for others."""
    check_draft_target(folder, target)
    config = ModelConfig.load(folder)
    return read_layers(folder, config, tuple(range(config.num_layers)), max_positions)


def check_draft_target(folder: Path, target: TargetIdentity) -> None:
    """Raises TrainingError for a draft that was trained for another target, or does not tell for which."""
    if not check_trained_for(folder, "draft", target):
        raise TrainingError(
            f"{folder} is a model of its own, and no draft that `sonar train fit --kind draft` wrote; "
            "`sonar bench` measures any draft model"
        )
