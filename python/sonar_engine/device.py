"""Where kernels run, and when the host may read what they give.

A device that runs alone works through what is queued for it while the host goes on. The host reads results through a
`HostCopy`, which waits for the kernels that were queued before it and for no later ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch


class HostCopy(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[np.ndarray]:
        """The values, in the order in which they were given. Returns the same arrays when called again."""
        ...


class Device(Protocol):
    """What the engine's loop asks of the place where kernels run."""

    @property
    def runs_alone(self) -> bool:
        """Whether queued kernels run while the host goes on."""
        ...

    @property
    def idle_seconds(self) -> float:
        """Time between the end of one step's kernels and the start of the next one's, summed, `rest` left out."""
        ...

    def copy_to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """Starts to bring `tensors`, which nobody changes afterwards, to the host; does not wait."""
        ...

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Names what the host does inside it, for profilers."""
        ...

    def begin_step(self) -> None:
        """A step's first kernel is about to be queued."""
        ...

    def end_step(self) -> None:
        """A step's last kernel has been queued."""
        ...

    def rest(self) -> None:
        """There is no work: the time until the next step is not idled away."""
        ...


def open_device(device: torch.device) -> Device:
    """The `Device` of a torch device."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor on `device`; a CPU's shares the array's memory.

    On CUDA it goes through pinned memory, so that the host does not wait for the kernels queued before the copy.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def write_to_device(array: np.ndarray, tensor: torch.Tensor) -> None:
    """Puts `array` into a tensor of its shape, as `to_device` brings it over: the host does not wait."""
    source = torch.from_numpy(array)
    tensor.copy_(source if tensor.device.type == "cpu" else source.pin_memory(), non_blocking=True)


class CpuDevice:
    """The host is the device: every call returns when its work is done."""

    runs_alone = False

    def __init__(self) -> None:
        self.idle_seconds = 0.0
        self._ended_at: float | None = None  # of the last step

    def copy_to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        return _OnHost([tensor.numpy() for tensor in tensors])

    def stage(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_step(self) -> None:
        if self._ended_at is not None:
            self.idle_seconds += time.perf_counter() - self._ended_at

    def end_step(self) -> None:
        self._ended_at = time.perf_counter()

    def rest(self) -> None:
        self._ended_at = None


class _OnHost:
    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays

    def wait(self) -> list[np.ndarray]:
        return self._arrays


class CudaDevice:
    """Kernels run on the current stream. Results come over on a stream of their own, into pinned memory.

    A copy on the current stream would have to wait for everything queued before it; this one waits for an event.
    Idle time is measured between events on the device and added up when they have passed, without waiting for them.
    """

    runs_alone = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)
        self._idle_ms = 0.0
        self._ended: torch.cuda.Event | None = None  # of the last step
        self._gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # not added up yet

    @property
    def idle_seconds(self) -> float:
        self._add_up_gaps()
        return self._idle_ms / 1e3

    def copy_to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        queued = torch.cuda.Event()
        queued.record(torch.cuda.current_stream(self._device))
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(queued)
            pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for to, tensor in zip(pinned, tensors, strict=True):
                to.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._copies)
            arrived.record(self._copies)
        return _PinnedCopy(pinned, arrived)

    def stage(self, name: str) -> AbstractContextManager[None]:
        return torch.cuda.nvtx.range(name)

    def begin_step(self) -> None:
        if self._ended is not None:
            self._gaps.append((self._ended, self._record()))
        if len(self._gaps) > 64:
            self._add_up_gaps()

    def end_step(self) -> None:
        self._ended = self._record()

    def rest(self) -> None:
        self._ended = None

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _add_up_gaps(self) -> None:
        while self._gaps and self._gaps[0][1].query():
            ended, began = self._gaps.pop(0)
            self._idle_ms += ended.elapsed_time(began)


class _PinnedCopy:
    def __init__(self, pinned: list[torch.Tensor], arrived: torch.cuda.Event) -> None:
        self._pinned = pinned
        self._arrived = arrived

    def wait(self) -> list[np.ndarray]:
        self._arrived.synchronize()
        return [tensor.numpy() for tensor in self._pinned]
