"""The SSDs of a machine profile: rates, capacity and endurance of each, how it is kept busy, and how bytes are striped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from headrace.terms.errors import ConfigError
from headrace.terms.figures import (
    amount,
    figure,
    mapping_of,
    optional_whole,
    refuse_excess,
    refuse_unknown,
    whole,
)
from headrace.terms.sizes import MIB

_MOST_DRIVE_BYTES_PER_SECOND = 1e12  # one directory may be a stripe over many drives
MOST_BYTES = 1e16
_MOST_ENDURANCE_BYTES = 1e19
_MOST_THREADS = 256
_MOST_PIECE_BYTES = 1 << 30
_MOST_CPU_SECONDS_PER_GIGABYTE = 1000.0
# Pieces are cut at multiples of this: direct input and output requires it.
_PIECE_UNIT_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """How drives are kept busy: by `threads` in each direction, each with a piece of at most `piece_bytes` under way.

    The defaults are those of the I/O engine without measurements.
    """

    threads: int = 4
    piece_bytes: int = 16 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """One SSD directory. `mixed_bytes_per_second` is the total of both directions when reads and writes run at once.

    `rated_endurance_bytes` is what the maker warrants to be writable over the drive's life (TBW), None where not known.
    `threads_per_direction` and `piece_bytes` are the setting of the I/O engine with which the rates were measured, None for its
    defaults. `io_cpu_seconds_per_gigabyte` is the CPU time of the engine's threads, system calls included, for 10^9 bytes.
    """

    read_bytes_per_second: float
    write_bytes_per_second: float
    mixed_bytes_per_second: float
    capacity_bytes: int
    rated_endurance_bytes: float | None = None
    threads_per_direction: int | None = None
    piece_bytes: int | None = None
    io_cpu_seconds_per_gigabyte: float | None = None

    @property
    def is_tuned(self) -> bool:
        """Whether a setting of the I/O engine is known for it."""
        return self.threads_per_direction is not None or self.piece_bytes is not None

    @property
    def in_flight(self) -> InFlight:
        """The setting of the I/O engine for this drive alone; what is not known is the engine's default."""
        default = InFlight()
        return InFlight(
            threads=self.threads_per_direction or default.threads, piece_bytes=self.piece_bytes or default.piece_bytes
        )

    @classmethod
    def from_json(cls, values: object, *, where: str) -> "Drive":
        """Return the drive that `values` describe; `where` names the place in errors, such as `rig: drives[0]`.

        Raises:
            ConfigError: a figure is missing, unknown or absurd.
        """
        figures = mapping_of(values, where=where)
        refuse_unknown(figures, {each.name for each in fields(cls)}, where=where)
        rates = {name: figure(figures, name, where=where, most=_MOST_DRIVE_BYTES_PER_SECOND) for name in _DRIVE_RATES}
        refuse_excess(rates, _DRIVE_RATES[2], _DRIVE_RATES[:2], where=where)
        endurance = figures.get("rated_endurance_bytes")
        if endurance is not None:
            endurance = figure(figures, "rated_endurance_bytes", where=where, most=_MOST_ENDURANCE_BYTES)
        capacity_bytes = whole(figures, "capacity_bytes", where=where, most=MOST_BYTES)
        return cls(
            **rates,
            capacity_bytes=capacity_bytes,
            rated_endurance_bytes=endurance,
            threads_per_direction=optional_whole(figures, "threads_per_direction", where=where, most=_MOST_THREADS),
            piece_bytes=optional_whole(
                figures, "piece_bytes", where=where, most=_MOST_PIECE_BYTES, multiple_of=_PIECE_UNIT_BYTES
            ),
            io_cpu_seconds_per_gigabyte=_cpu_cost(figures, where=where),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the drive as plain JSON values."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def striped_shares(drives: Sequence[Drive]) -> tuple[float, ...]:
    """Return the share of all bytes that each drive gets. It is in proportion to the drive's rate while it reads and writes at
    once. `files.stripe_shares` lays out the stripes so, but roughly, in small integers.
    """
    rate = sum(drive.mixed_bytes_per_second for drive in drives)
    return tuple(drive.mixed_bytes_per_second / rate for drive in drives)


_DRIVE_RATES = ("read_bytes_per_second", "write_bytes_per_second", "mixed_bytes_per_second")


def _cpu_cost(figures: Mapping[str, Any], *, where: str) -> float | None:
    """Return the CPU seconds per 10^9 bytes. They may be 0, because a coarse clock may have counted none."""
    name = "io_cpu_seconds_per_gigabyte"
    return None if figures.get(name) is None else amount(figures, name, where=where, most=_MOST_CPU_SECONDS_PER_GIGABYTE)


def drives_of(figures: Mapping[str, Any], *, where: str) -> tuple[Drive, ...]:
    """Return the drives of a machine profile; ConfigError names the field that is missing, unknown or absurd."""
    drives = figures.get("drives")
    if not isinstance(drives, list | tuple) or not drives:
        raise ConfigError(f"{where}: drives is {drives!r}; write a list with one object per SSD directory")
    return tuple(Drive.from_json(drive, where=f"{where}: drives[{index}]") for index, drive in enumerate(drives))
