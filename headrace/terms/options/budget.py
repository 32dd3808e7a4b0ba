"""How much of each tier a run may use."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.terms.sizes import parse_bytes

# The rest stays free for the desktop's windows, the page cache, the file system and what other programs write to it.
_DEFAULT_PERCENT = {"device": 90, "host": 70, "ssd": 90}


def default_bytes(tier: str, free_bytes: int) -> int:
    """Return the default budget of a tier: 90 % of free device memory and SSD space, 70 % of available memory."""
    return free_bytes * _DEFAULT_PERCENT[tier] // 100


@dataclass(frozen=True, slots=True, init=False)
class Budget:
    """Bytes of device memory and of this process's host memory, and the SSD directories.

    `device=None` means 90 % of the free memory of a GPU. Without a GPU it means no device tier: the CPU computes in host
    memory. `host=None` means 70 % of the available memory. `ssd=()` means a folder inside the run directory. Without a GPU a
    given `device` makes a separate device tier inside host memory, so that the whole three-tier path runs anywhere.
    """

    device_bytes: int | None
    host_bytes: int | None
    ssd: tuple[Path, ...]

    def __init__(
        self,
        device: str | int | None = None,
        host: str | int | None = None,
        ssd: str | Path | Sequence[str | Path] = (),
    ) -> None:
        set_field = object.__setattr__  # frozen: fields are set once, here
        set_field(self, "device_bytes", None if device is None else parse_bytes(device, name="device memory"))
        set_field(self, "host_bytes", None if host is None else parse_bytes(host, name="host memory"))
        directories = (ssd,) if isinstance(ssd, str | Path) else ssd
        set_field(self, "ssd", tuple(Path(directory) for directory in directories))
