"""What a run may use, and what the interpreter takes of it."""

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.terms.sizes import MIB, round_up

# The most by which the interpreter's memory differs between equal processes; 1.8 MB were measured (docs/log/process-memory).
RUNTIME_SPREAD = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a run may use. The interpreter and its libraries already take `runtime_bytes` of host memory.

    `ssd_bytes` may be written to the SSDs; None if the space is not known; creating the files checks it.
    `import_workspace_bytes` are needed, besides a unit's planes, while the model's tensors are read and while they are written
    at the end. None if neither is done. `saves`: models are to be kept during the run. Tables whose rows are read one by one
    take `table_bytes` of host memory, and `table_drive_bytes`. So many ranks of one machine are `sharers` of one host copy.
    """

    host_bytes: int
    device_bytes: int | None
    runtime_bytes: int
    cores: int
    chunk_elements: int | None = None  # None, unless an existing store fixes it
    device_overhead_bytes: int = 0  # taken on the device by libraries and the allocator, besides tensors
    import_workspace_bytes: int | None = None
    ssd_bytes: int | None = None
    saves: bool = False
    table_bytes: int = 0
    table_drive_bytes: int = 0
    sharers: int = 1

    def of(self, tiers: Iterable[str]) -> dict[str, int]:
        """Return what is allowed of those of these tiers of which it is known."""
        known = {"host": self.host_bytes, "device": self.device_bytes, "ssd": self.ssd_bytes}
        return {tier: most for tier, most in known.items() if tier in {*tiers} and most is not None}


def planned_runtime_bytes(measured: int) -> int:
    """Return the bytes to plan for the interpreter and its libraries, of which this process has `measured`. They are rounded,
    because another process for the same command differs by one or two mebibytes, and should get the same plan where it can.
    """
    return round_up(measured + RUNTIME_SPREAD, RUNTIME_SPREAD)
