"""Says so before a control group kills: near its limit the kernel ends a process without a word.

Invariant: a group is told of once in a while, and only what cannot be dropped counts: page cache is no reason to warn.
"""

import threading
from pathlib import Path

from headrace.machine.host_memory import anonymous_bytes
from headrace.machine.limits import nearest_group
from headrace.terms.closing import Closing
from headrace.terms.events import Notice, Sink
from headrace.terms.sizes import MIB, format_bytes

_NEAR_BYTES, _NEAR_SHARE = 64 * MIB, 0.02
_EVERY_SECONDS, _LOOKS_BETWEEN = 1.0, 600


class NearLimit(Closing):
    """Looks once a second on a thread of its own, and tells `sink`. Close it, or use it as a context manager."""

    def __init__(self, sink: Sink, root: Path = Path("/")) -> None:
        self._sink, self._root = sink, root
        self._silent_looks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="headrace near limit", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Tell of the group that is nearest to its limit, if hardly anything is left, and it was not told lately."""
        self._silent_looks = max(0, self._silent_looks - 1)
        group = nearest_group(self._root)
        if group is None or self._silent_looks or group.rest_bytes > max(_NEAR_BYTES, _NEAR_SHARE * group.limit_bytes):
            return
        self._silent_looks = _LOOKS_BETWEEN
        own, used, limit = (format_bytes(each) for each in (anonymous_bytes(), group.used_bytes, group.limit_bytes))
        self._sink(
            Notice(
                text=f"memory: a control group allows {limit}, and {used} of it are taken, {own} by this process; the kernel "
                "ends processes at the limit. Give a smaller --host-memory, or end what else runs there"
            )
        )

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self.look()
