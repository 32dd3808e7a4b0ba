"""The peak of this process's anonymous memory, sampled: the kernel's own high-water mark counts files too."""

import threading

from headrace.machine.host import process_status_bytes


class MemoryMeter:
    """Samples `RssAnon` on a thread of its own, 20 times a second."""

    def __init__(self, interval_seconds: float = 0.05) -> None:
        self._peak_bytes = 0
        self._interval_seconds = interval_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="headrace memory meter", daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Forget the peak so far."""
        self._peak_bytes = process_status_bytes("RssAnon")

    def peak_bytes(self) -> int:
        """Return the largest sample since `reset`."""
        self._peak_bytes = max(self._peak_bytes, process_status_bytes("RssAnon"))
        return self._peak_bytes

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self._peak_bytes = max(self._peak_bytes, process_status_bytes("RssAnon"))
