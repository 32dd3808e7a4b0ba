"""An NVIDIA GPU: one stream per device lane, pinned host arenas, timed events as marks.

Host arenas are registered with CUDA as a whole (exact size; torch's own pinned allocator rounds to powers of two). Invariants:
a lane's device work is on its own stream, and nothing is on the default stream while a step runs. Memory that crosses streams
is lent (`lend`). A mapping is unregistered before it can be unmapped.
"""

import contextlib
import time
from contextlib import AbstractContextManager

import torch

from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.machine.protocol import DeviceEvent
from headrace.terms.errors import InputError
from headrace.terms.lanes import Lane
from headrace.terms.sizes import MIB, format_bytes

# Workspaces of cuBLAS (32 MiB for each of the two threads that compute: this one and autograd's) and the allocator's segments.
GPU_OVERHEAD_BYTES = 160 * MIB
# An event's time is a float32 of milliseconds since the base: later than this it would be coarser than 10 microseconds.
_BASE_SECONDS = 60.0


class _Base:
    """An event whose moment on the host's clock is known, so that other events have one too."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stream.synchronize()
        stream.record_event(self.event)
        self.event.synchronize()
        self.host_seconds = time.perf_counter()


class _Mark:
    """A timed event on a stream."""

    __slots__ = ("_base", "event")

    def __init__(self, stream: torch.cuda.Stream, base: _Base) -> None:
        self._base = base
        # Blocking: a lane that waits sleeps; spinning would take a core from the update.
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        stream.record_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()

    def reached_seconds(self) -> float:
        return self._base.host_seconds + float(self._base.event.elapsed_time(self.event)) / 1e3


class CudaMachine:
    """The GPU `device`. `memory_limit_bytes` caps torch's allocator, so that the device budget is enforced, not hoped for.

    Raises:
        InputError: the limit is more than the GPU has.
    """

    def __init__(self, device: str = "cuda:0", *, memory_limit_bytes: int | None = None) -> None:
        self.device = torch.device(device)
        self.separate_device = True
        self.device_overhead_bytes = GPU_OVERHEAD_BYTES
        torch.cuda.set_device(self.device)
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        limit_bytes = total_bytes if memory_limit_bytes is None else memory_limit_bytes
        if limit_bytes > total_bytes:
            raise InputError(
                f"device memory: asked {format_bytes(limit_bytes)}, "
                f"{torch.cuda.get_device_name(self.device)} has {format_bytes(total_bytes)}; ask for less"
            )
        _forget_earlier_machines(self.device)
        self._streams = {lane: _stream(self.device, priority=lane.row.stream) for lane in Lane if lane.row.stream is not None}
        self._registered: list[Bytes] = []
        self._load_libraries()
        # After the libraries: a budget that is too small is the planner's to refuse, in words.
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, self.device)
        self._base = _Base(self._streams[Lane.COMPUTE])

    def multiplies(self, dtype: str) -> bool:
        """How a GPU multiplies is left to its libraries."""
        return True

    def host_buffer(self, num_bytes: int) -> Bytes:
        """Return huge-page host memory, registered with CUDA (pinned) until `release_host_buffers`.

        Raises:
            InputError: the driver refused to pin it.
        """
        return self.pinned(huge_page_buffer(num_bytes))

    def pinned(self, buffer: Bytes) -> Bytes:
        """Return `buffer`, registered with CUDA until `release_host_buffers`. Raises as `host_buffer`."""
        result = torch.cuda.cudart().cudaHostRegister(buffer.ctypes.data, buffer.size, 0)  # type: ignore[no-untyped-call]
        if int(result) != 0:
            raise InputError(
                f"pinned memory: the driver refused to pin {format_bytes(buffer.size)} (CUDA error {int(result)}); "
                "lower the host memory budget (WSL and containers cap pinned memory; see `headrace doctor`)"
            )
        self._registered.append(buffer)  # keeps the mapping: an unmapped range must not stay registered
        return buffer

    def device_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return device memory from torch's allocator, in one piece."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(
            self.device
        )  # where torch is told to be deterministic it fills it, on a stream no lane waits for
        return memory

    def lane(self, lane: Lane) -> AbstractContextManager[object]:
        """Return the stream context of a device lane; other lanes do no device work."""
        return torch.cuda.stream(self._streams.get(lane))

    def record(self, lane: Lane) -> DeviceEvent | None:
        """Record a timed event on `lane`'s stream."""
        stream = self._streams.get(lane)
        if stream is None:
            return None
        if lane is Lane.COMPUTE and time.perf_counter() - self._base.host_seconds > _BASE_SECONDS:
            self._base = _Base(stream)  # waits for compute once a minute, for two operations at most
        return _Mark(stream, self._base)

    def wait(self, event: DeviceEvent, lane: Lane) -> None:
        """Let the stream wait, or this thread where the lane has none."""
        stream = self._streams.get(lane)
        if stream is not None and isinstance(event, _Mark):
            stream.wait_event(event.event)
        else:
            event.synchronize()

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Issue an asynchronous copy on the current stream (both ends pinned or on the device)."""
        into.copy_(source, non_blocking=True)

    def lend(self, tensor: torch.Tensor, lane: Lane) -> None:
        """Tell the caching allocator that `lane`'s stream uses the tensor's memory too."""
        stream = self._streams.get(lane)
        if stream is not None and tensor.is_cuda:
            tensor.record_stream(stream)

    def release_host_buffers(self) -> None:
        """Unpin all host buffers after the last copy. A device that failed was told of when it did; nothing is raised."""
        registered, self._registered = self._registered, []
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self.device)
        for buffer in registered:
            torch.cuda.cudart().cudaHostUnregister(buffer.ctypes.data)  # type: ignore[no-untyped-call]

    def device_memory_bytes(self) -> tuple[int, int]:
        """Return `(free, total)` as the driver says."""
        return torch.cuda.mem_get_info(self.device)

    def device_peak_bytes(self) -> int:
        """Return torch's largest reservation since this machine was made."""
        return torch.cuda.max_memory_reserved(self.device)

    def _load_libraries(self) -> None:
        """Multiply once: what the libraries take of host memory is then there when the host's runtime is measured."""
        with self.lane(Lane.COMPUTE):
            matrix = torch.ones(64, 64, dtype=torch.bfloat16, device=self.device)
            torch.mm(matrix, matrix)
        torch.cuda.synchronize(self.device)


def _forget_earlier_machines(device: torch.device) -> None:
    """What an earlier machine of this process left counts neither as the next one's peak nor against its limit."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # one for each stream there ever was
    if clear is not None:
        clear()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.set_per_process_memory_fraction(1.0, device)


def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
