"""The peak of this process's anonymous memory, sampled: the kernel's own high-water mark counts files too."""

import threading
from collections.abc import Callable

from headrace.machine.host_memory import STATM, anonymous_bytes, anonymous_bytes_of
from headrace.machine.protocol import Machine
from headrace.terms.closing import Closing

# Often enough to see a step's peak; and where somebody acts on what is seen, before more is made than `HeapGuard` leaves
# room for. The latter takes 1.3 % of a core where nothing else runs.
_SECONDS, _ACTING_SECONDS = 0.05, 0.005


class MemoryMeter(Closing):
    """Samples `anonymous_bytes` on a thread of its own: 20 times a second, and 200 times once `tell` was called. Close it, or
    use it as a context manager.
    """

    def __init__(self) -> None:
        self._peak_bytes = 0
        self._interval_seconds = _SECONDS
        self._listener: Callable[[int], None] | None = None
        self._more: Callable[[], int] = lambda: 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="headrace memory meter", daemon=True)
        self._thread.start()

    def tell(self, listener: Callable[[int], None]) -> None:
        """Call `listener` with each sample from now on, on the meter's thread, and no other that was told before."""
        self._listener, self._interval_seconds = listener, _ACTING_SECONDS

    def count(self, more: Callable[[], int]) -> None:
        """Count what `more` returns, too: of memory that several processes have together, the share of this one."""
        self._more = more

    def bytes_now(self) -> int:
        """Return what is resident at this moment."""
        return anonymous_bytes() + self._more()

    def reset(self) -> None:
        """Forget the peak so far."""
        self._peak_bytes = self.bytes_now()

    def peak_bytes(self) -> int:
        """Return the largest sample since `reset`."""
        self._peak_bytes = max(self._peak_bytes, self.bytes_now())
        return self._peak_bytes

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        try:
            statm = STATM.open("rb", buffering=0)
        except OSError:  # another kernel: there is nothing to be seen
            return
        with statm:
            while not self._stop.wait(self._interval_seconds):
                statm.seek(0)
                sample = anonymous_bytes_of(statm.read()) + self._more()
                self._peak_bytes = max(self._peak_bytes, sample)
                if self._listener is not None:
                    self._listener(sample)


def measured_peaks(meter: MemoryMeter, machine: Machine, device_bytes: int) -> dict[str, int]:
    """Return the measured peaks by tier. The bytes of a device tier that lies inside host memory are subtracted."""
    host = meter.peak_bytes()
    if machine.device.type == "cuda":
        return {"device": machine.device_peak_bytes(), "host": host}
    return {"host": host - device_bytes}
