"""What stands for the capture of CUDA graphs: passes that run again over the buffers they were captured with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sonar_engine import cuda_graphs, model_runner
from sonar_engine.attention.native_attention import NativeAttention
from sonar_engine.attention.torch_attention import TorchAttention
from sonar_engine.config import EngineConfig

Tensors = tuple[torch.Tensor, ...]


class StandIn:
    """A `Capture` that keeps the function. As with a graph, every replay writes over what the last one gave."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0

    def __call__(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        self.num_captures += 1
        outputs = tuple(output.clone() for output in function())

        def replay() -> Tensors:
            self.num_replays += 1
            for output, value in zip(outputs, function(), strict=True):
                output.copy_(value)
            return outputs

        return replay


def graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """From now on `cuda_graphs` has its effect on a CPU too, with the stand-in that is returned."""
    stand_in = StandIn()

    def wants_graphs(engine_config: EngineConfig, device: torch.device) -> bool:
        return engine_config.cuda_graphs

    for module in (cuda_graphs, model_runner):
        monkeypatch.setattr(module, "wants_graphs", wants_graphs)
    for backend in (TorchAttention, NativeAttention):
        monkeypatch.setattr(backend, "can_capture", lambda self, num_rows, q_len: True)
    monkeypatch.setattr(cuda_graphs, "CudaCapture", lambda: stand_in)
    return stand_in
