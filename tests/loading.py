"""Loading a model in a test, and the error that must come where it cannot load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sonar_engine.errors import ModelLoadError
from sonar_engine.models.model_config import ModelConfig
from sonar_engine.models.weights import load_weights

ONE_LINE_AT_MOST = 1200  # characters


def fails_with(action: Callable[[], Any], *parts: str) -> None:
    """Runs `action`, which must raise ModelLoadError in one line that holds every part."""
    with pytest.raises(ModelLoadError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < ONE_LINE_AT_MOST
    for part in parts:
        assert part in message


def load(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_weights(path, ModelConfig.load(path), dtype)
