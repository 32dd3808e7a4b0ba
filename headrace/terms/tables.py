"""How reports are written: labelled lines, columns of figures, and figures that may be unknown."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_bytes, format_seconds

_LABEL, _NAME = 10, 20
# A plan in brief has so many lines.
MOST_LINES = 10


class Report(ABC):
    """An answer: lines for people, and plain JSON values for programs."""

    __slots__ = ()

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """Yield the lines that people read."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; unknown figures are null."""

    def explain(self) -> str:
        """Return the report as lines for people."""
        return "\n".join(self.lines())

    def brief(self) -> str:
        """Return what decides, in ten lines."""
        return self.explain()


def ten_lines(lines: Iterable[str]) -> str:
    """Return the first ten lines, the last of which says how many more there are."""
    found = list(lines)
    if len(found) > MOST_LINES:
        found[MOST_LINES - 1 :] = [line("more", f"{len(found) - MOST_LINES + 1} lines: --verbose")]
    return "\n".join(found)


def memory_line(tiers: Mapping[str, int], allowed: Mapping[str, int]) -> str:
    """Return what is used of each tier within a sentence."""
    used = {tier: size for tier, size in tiers.items() if size}
    return ", ".join(
        f"{tier} {format_bytes(size)}" + (f" of {format_bytes(allowed[tier])}" if tier in allowed else "")
        for tier, size in used.items()
    )


def quantity(value: float | None, unit: str) -> str:
    """Return a figure as people read it; `unit` is `bytes`, `seconds` or another that its row names."""
    if value is None:
        return "-"
    if unit == "bytes":
        return format_bytes(value)
    return format_seconds(value) if unit == "seconds" else plain_figure(value, 4)


def line(label: str, text: str) -> str:
    """Return a line of text under a label."""
    return label.ljust(_LABEL) + text


def row(name: str, cells: Iterable[str], width: int = 12) -> str:
    """Return a row of a table whose columns are `width` wide."""
    return name.ljust(_NAME) + "".join(cell.rjust(width) for cell in cells)


@dataclass(frozen=True, slots=True)
class Memory:
    """A column of a table of memory: bytes by purpose, and the most that may be used, None where that is unknown."""

    name: str
    purposes: Mapping[str, int]
    allowed: int | None

    @property
    def peak(self) -> int:
        """Bytes of all purposes."""
        return sum(self.purposes.values())


def memory_table(columns: Sequence[Memory], *, free: bool, width: int = 12) -> Iterator[str]:
    """Yield a row for each purpose, then peaks, what is left where `free` asks for it, and what is allowed."""
    yield row("", (column.name for column in columns), width)
    for purpose in dict.fromkeys(purpose for column in columns for purpose in column.purposes):
        sizes = [column.purposes.get(purpose, 0) for column in columns]
        if any(sizes):
            yield row(purpose, (format_bytes(size) if size else "-" for size in sizes), width)
    yield row("peak", (format_bytes(column.peak) for column in columns), width)
    if free:
        left = (None if column.allowed is None else column.allowed - column.peak for column in columns)
        yield row("free", map(_bytes_or_unknown, left), width)
    yield row("allowed", (_bytes_or_unknown(column.allowed) for column in columns), width)


def _bytes_or_unknown(size: int | None) -> str:
    return "unknown" if size is None else format_bytes(size)


def figures(found: object | None, *names: str) -> dict[str, Any]:
    """Return attributes of `found` by name, for JSON; all None where nothing was found."""
    return {name: getattr(found, name) if found is not None else None for name in names}
