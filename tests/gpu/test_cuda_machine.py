"""A GPU behind the machine's protocol: copies, marks, pinned arenas, lent memory, and a budget that is enforced."""

import time

import numpy as np
import pytest
import torch

from headrace.machine.cuda import CudaMachine
from headrace.terms.errors import InputError
from headrace.terms.lanes import Lane
from headrace.terms.sizes import GIB, MIB

pytestmark = pytest.mark.gpu

# torch has one way to keep a stream busy for a known number of clock cycles; about 0.1 s at 2 GHz.
LONG_CYCLES = 200_000_000


def test_bytes_survive_the_way_to_the_device_and_back() -> None:
    machine = CudaMachine()
    there, back = machine.host_buffer(8 * MIB), machine.host_buffer(8 * MIB)
    there[:] = np.random.default_rng(0).integers(0, 256, there.size, dtype=np.uint8)
    device = machine.device_buffer(8 * MIB)
    with machine.lane(Lane.HOST_TO_DEVICE):
        machine.copy(device, torch.from_numpy(there))
    uploaded = machine.record(Lane.HOST_TO_DEVICE)
    machine.wait(uploaded, Lane.DEVICE_TO_HOST)
    with machine.lane(Lane.DEVICE_TO_HOST):
        machine.copy(torch.from_numpy(back), device)
    machine.record(Lane.DEVICE_TO_HOST).synchronize()
    assert np.array_equal(there, back)
    machine.release_host_buffers()


def test_a_lane_waits_for_another_on_the_device_and_not_on_the_host() -> None:
    machine = CudaMachine()
    host = machine.host_buffer(4 * MIB)
    device = machine.device_buffer(4 * MIB).fill_(1)
    torch.cuda.synchronize()
    started = time.perf_counter()
    with machine.lane(Lane.COMPUTE):
        torch.cuda._sleep(LONG_CYCLES)
        device.fill_(2)
    machine.wait(machine.record(Lane.COMPUTE), Lane.DEVICE_TO_HOST)
    with machine.lane(Lane.DEVICE_TO_HOST):
        machine.copy(torch.from_numpy(host), device)
    done = machine.record(Lane.DEVICE_TO_HOST)
    issued_seconds = time.perf_counter() - started
    done.synchronize()
    assert issued_seconds < 0.5 * (time.perf_counter() - started), "the copy was not asynchronous: is the host memory pinned?"
    assert (host == 2).all()
    machine.release_host_buffers()


def test_marks_tell_the_time_of_the_host() -> None:
    machine = CudaMachine()
    before = time.perf_counter()
    begin = machine.record(Lane.COMPUTE)
    with machine.lane(Lane.COMPUTE):
        torch.cuda._sleep(LONG_CYCLES)
    end = machine.record(Lane.COMPUTE)
    end.synchronize()
    after = time.perf_counter()
    assert before - 1e-3 <= begin.reached_seconds() < end.reached_seconds() <= after + 1e-3
    assert end.reached_seconds() - begin.reached_seconds() > 0.02
    assert machine.record(Lane.UPDATE) is None


def test_host_buffers_are_pinned_until_they_are_released() -> None:
    machine = CudaMachine()
    for _ in range(10):  # a mapping that stayed registered would be refused when its addresses come again
        buffer = machine.host_buffer(32 * MIB)
        assert torch.from_numpy(buffer).is_pinned()
        machine.release_host_buffers()
        assert not torch.from_numpy(buffer).is_pinned()
        assert not buffer.any()
        del buffer


def test_lent_memory_is_not_handed_on_while_it_is_in_use() -> None:
    machine = CudaMachine()
    with machine.lane(Lane.HOST_TO_DEVICE):
        lent = torch.full((4 << 20,), 3.0, device=machine.device)
    machine.wait(machine.record(Lane.HOST_TO_DEVICE), Lane.COMPUTE)
    with machine.lane(Lane.COMPUTE):
        torch.cuda._sleep(LONG_CYCLES)
        total = lent.sum()
    machine.lend(lent, Lane.COMPUTE)
    del lent  # compute has not read it yet
    with machine.lane(Lane.HOST_TO_DEVICE):
        torch.full((4 << 20,), 7.0, device=machine.device)
    machine.record(Lane.COMPUTE).synchronize()
    assert float(total) == 3.0 * (4 << 20)


def test_the_budget_is_enforced_and_the_next_machine_has_its_own() -> None:
    machine = CudaMachine(memory_limit_bytes=GIB)
    with pytest.raises(torch.OutOfMemoryError):
        machine.device_buffer(2 * GIB)
    assert machine.device_peak_bytes() <= GIB
    larger = CudaMachine()
    assert larger.device_buffer(2 * GIB).numel() == 2 * GIB
    assert larger.device_peak_bytes() >= 2 * GIB
    assert CudaMachine(memory_limit_bytes=GIB).device_peak_bytes() <= GIB


def test_more_than_the_gpu_has_is_refused() -> None:
    with pytest.raises(InputError, match="ask for less"):
        CudaMachine(memory_limit_bytes=1 << 50)
