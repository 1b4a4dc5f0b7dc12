"""The CUDA side of the step loop: copies on their own stream, pinned slots, and idle time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from sonar_engine.device import CudaDevice, to_device, write_to_device
from sonar_engine.step_buffers import HEADER, HEADER_WORDS, MAGIC, SECTION_OFFSETS_AT, SECTIONS, StepBuffers

pytestmark = pytest.mark.gpu

CYCLES = 400_000_000  # of a kernel that does nothing for some tenths of a second
SHORT = 0.05  # seconds, far less than that kernel takes


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.synchronize()
    yield torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()


def occupy() -> torch.cuda.Event:
    """Queues a long kernel; the event has passed when it is done."""
    torch.cuda._sleep(CYCLES)
    done = torch.cuda.Event()
    done.record()
    return done


def test_a_copy_to_the_host_does_not_wait_for_later_kernels(cuda: torch.device) -> None:
    device = CudaDevice(cuda)
    device.copy_to_host([torch.zeros(1, device=cuda)]).wait()  # pinned memory is set up once
    values = torch.arange(5, device=cuda) * 2
    copy = device.copy_to_host([values, values.float()])
    later = occupy()
    ints, floats = copy.wait()
    assert not later.query()
    assert ints.tolist() == [0, 2, 4, 6, 8]
    assert floats.dtype == np.float32


def test_a_copy_to_the_host_waits_for_the_kernels_before_it(cuda: torch.device) -> None:
    device, values = CudaDevice(cuda), torch.zeros(4, device=cuda)
    earlier = occupy()
    values += 3
    (on_host,) = device.copy_to_host([values]).wait()
    assert earlier.query()
    assert on_host.tolist() == [3.0] * 4


def test_copies_to_the_device_are_queued_without_waiting(cuda: torch.device) -> None:
    target = torch.zeros(4, dtype=torch.int32, device=cuda)
    array = np.arange(4, dtype=np.int32)
    to_device(array, cuda)  # pinned memory is set up once
    torch.cuda.synchronize()
    busy = occupy()
    fresh = to_device(array, cuda)
    write_to_device(array, target)
    assert not busy.query()
    array[:] = -1  # the caller's own again
    assert fresh.tolist() == target.tolist() == [0, 1, 2, 3]


def test_idle_time_is_what_passes_between_the_kernels_of_two_steps(cuda: torch.device) -> None:
    device = CudaDevice(cuda)
    for pause in (0.0, 4 * SHORT):
        device.begin_step()
        device.end_step()
        torch.cuda.synchronize()
        time.sleep(pause)
    device.begin_step()
    torch.cuda.synchronize()
    assert device.idle_seconds == pytest.approx(4 * SHORT, rel=0.3)


def test_a_rest_and_a_queue_that_never_runs_dry_are_not_idle_time(cuda: torch.device) -> None:
    device = CudaDevice(cuda)
    device.begin_step()
    device.end_step()
    device.rest()
    torch.cuda.synchronize()
    time.sleep(SHORT)
    for _ in range(3):
        device.begin_step()
        torch.cuda._sleep(CYCLES // 10)
        device.end_step()
    torch.cuda.synchronize()
    assert device.idle_seconds < SHORT / 10


def packed_slot(num_words: int) -> np.ndarray:
    slot = np.zeros(num_words, np.int32)
    slot[HEADER["magic"]] = MAGIC
    return slot


def pack(slot: np.ndarray, token_ids: list[int]) -> None:
    """One row with these tokens, into page 0."""
    sections = {name: np.zeros(0, np.int32) for name in SECTIONS}
    sections |= {name: np.zeros(1, np.int32) for name in SECTIONS[:9]}
    sections |= {name: np.zeros(2, np.int32) for name in ("qo_indptr", "paged_kv_indptr", "sample_indptr")}
    for name in ("token_ids", "positions", "slot_mapping", "token_reqs"):
        sections[name] = np.zeros(len(token_ids), np.int32)
    sections["token_ids"][:] = token_ids
    at = HEADER_WORDS
    for index, name in enumerate(SECTIONS):
        slot[SECTION_OFFSETS_AT + index] = at
        slot[at : at + len(sections[name])] = sections[name]
        at += len(sections[name])
    slot[HEADER["num_reqs"]] = 1
    slot[HEADER["num_tokens"]] = len(token_ids)
    slot[HEADER["num_words"]] = at


def test_a_slot_is_rewritten_while_the_other_one_is_still_to_be_copied(cuda: torch.device) -> None:
    slots = packed_slot(4096), packed_slot(4096)
    buffers = StepBuffers(slots, torch.zeros(2, 8, dtype=torch.int32, device=cuda))
    assert all(pinned.is_pinned() for pinned in buffers._pinned)
    pack(slots[0], [1, 2, 3])
    busy = occupy()
    first = buffers.load(1)
    assert buffers.next_slot == 1
    pack(slots[1], [4, 5, 6, 7])
    second = buffers.load(2)
    assert not busy.query()  # both copies are behind the kernel, and nobody has waited
    torch.cuda.synchronize()
    assert first.token_ids.tolist() == [1, 2, 3]
    pack(slots[0], [8, 9])
    assert second.token_ids.tolist() == [4, 5, 6, 7]
    assert buffers.load(3).token_ids.tolist() == [8, 9]
