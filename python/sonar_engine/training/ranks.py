"""The processes of one `torchrun`, or the one of a plain run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


@dataclass(frozen=True)
class Ranks:
    """This process among `size`, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def shard(self, module: nn.Module) -> None:
        """FSDP2 over all ranks: each holds its part of every parameter. Nothing for a single one."""
        if self.size > 1:
            fully_shard(module, mesh=init_device_mesh(self.device.type, (self.size,)))

    def gather_no_more(self, module: nn.Module) -> None:
        """After a forward pass without a backward one: its parameters are the sharded ones again."""
        if isinstance(module, FSDPModule):
            module.reshard()

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def join_ranks(device_type: str) -> Iterator[Ranks]:
    """The group that torchrun's environment describes: gloo on CPUs, NCCL on CUDA; without it a single rank."""
    if not dist.is_torchelastic_launched():
        yield Ranks(0, 1, torch.device(device_type))
        return
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()
