"""What a run needs to go on as if it had never stopped: master weights, AdamW's moments and the step, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sonar_engine.errors import TrainingError, reason
from sonar_engine.files import replacing

STATE = "state.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_state(path: Path, module: nn.Module, optimiser: torch.optim.Optimizer, facts: dict[str, str]) -> None:
    """Called by every rank, since sharded tensors are put together; rank 0 writes. `facts` has at least `step`."""
    tensors = {}
    for name, parameter in module.named_parameters():
        tensors[f"weight/{name}"] = whole(parameter.detach())
        for moment in _MOMENTS:
            tensors[f"{moment}/{name}"] = whole(optimiser.state[parameter][moment])
    if is_first_rank():
        on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        with replacing(path) as part:
            save_file(on_cpu, part, facts)


def read_facts(path: Path) -> dict[str, str] | None:
    """What `save_state` was told; None where there is no state. Raises TrainingError for a damaged file."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{path} is damaged ({reason(error)}); remove it to begin again") from None


def load_state(path: Path, module: nn.Module, optimiser: torch.optim.Optimizer, step: int) -> None:
    """Into a module and an optimiser of the same shape that have done nothing yet, sharded or not."""
    with torch.no_grad(), safe_open(path, "pt") as file:
        for name, parameter in module.named_parameters():
            _place(file.get_tensor(f"weight/{name}"), parameter)
            state: dict[str, Any] = {"step": torch.tensor(float(step))}
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(parameter)
                _place(file.get_tensor(f"{moment}/{name}"), state[moment])
            optimiser.state[parameter] = state


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _place(value: torch.Tensor, into: torch.Tensor) -> None:
    if isinstance(into, DTensor):
        value = distribute_tensor(value.to(into.device), into.device_mesh, into.placements)
    into.copy_(value)


def is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
