"""Where each unit's planes lie in the volume: a value, computed once from layouts and planes.

A *group* is what is written and committed as a whole: the weight plane of a unit, or all its state planes. Each group has two
slots; inside a slot its chunks follow one another. Behind the last slot begins the scratch region. Invariant: slots do not
overlap, and every chunk begins and ends on a border of 4096 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from headrace.files import BLOCK_BYTES
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UNIT_ALIGNMENT, PlaneSet, UnitLayout, chunk_ranges


class GroupKind(StrEnum):
    """Which planes of a unit."""

    WEIGHTS = "weights"
    STATES = "states"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # a key of tables: itself, not its content
class GroupPlace:
    """The two slots of a group. Chunk `k` lies at `slot_offsets[slot] + chunk_offsets[k]`; the last is the slot's size."""

    unit: int
    unit_name: str
    kind: GroupKind
    slot_offsets: tuple[int, int]
    chunk_offsets: tuple[int, ...]

    @property
    def num_chunks(self) -> int:
        """Chunks in the group."""
        return len(self.chunk_offsets) - 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of all chunks."""
        return self.chunk_offsets[-1]

    def chunk_bytes(self, chunk: int) -> int:
        """Bytes of one chunk."""
        return self.chunk_offsets[chunk + 1] - self.chunk_offsets[chunk]

    def offset(self, slot: int, chunk: int) -> int:
        """Volume offset of a chunk in a slot."""
        return self.slot_offsets[slot] + self.chunk_offsets[chunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """All groups: `weights[u]` and `states[u]` of unit `u`, and where the scratch region begins."""

    weights: tuple[GroupPlace, ...]
    states: tuple[GroupPlace, ...]
    durable_bytes: int

    @property
    def groups(self) -> tuple[GroupPlace, ...]:
        """Every group, in the order of the commit record: all weights, then all states."""
        return self.weights + self.states


def place_units(layouts: Sequence[UnitLayout], planes: PlaneSet, chunk_elements: int) -> Places:
    """Place two slots of weights and of states for each unit, one unit after another.

    Raises:
        ConfigError: a chunk, a unit or a plane set whose sizes are no multiples of 4096 bytes.
    """
    if chunk_elements < UNIT_ALIGNMENT or chunk_elements % UNIT_ALIGNMENT:
        raise ConfigError(f"chunk of {chunk_elements} elements: expected a positive multiple of {UNIT_ALIGNMENT}")
    # States are padded to pages chunk by chunk; weights are read as a whole, so theirs must have no gaps.
    if planes.weight.num_bytes(UNIT_ALIGNMENT) % BLOCK_BYTES:
        raise ConfigError(
            f"{planes.compute_dtype} weights: {planes.weight.bytes_per_element} bytes per element, so that {UNIT_ALIGNMENT} "
            f"elements are no multiple of {BLOCK_BYTES} bytes; use a plane whose size is even"
        )
    offset = 0
    placed: dict[GroupKind, list[GroupPlace]] = {GroupKind.WEIGHTS: [], GroupKind.STATES: []}
    for unit, layout in enumerate(layouts):
        if layout.num_elements < 0 or layout.num_elements % UNIT_ALIGNMENT:
            raise ConfigError(f"unit {layout.name}: {layout.num_elements} elements, expected a multiple of {UNIT_ALIGNMENT}")
        ranges = chunk_ranges(layout.num_elements, chunk_elements)
        for kind, bytes_of in {GroupKind.WEIGHTS: planes.weight.num_bytes, GroupKind.STATES: planes.state_bytes}.items():
            chunk_offsets = tuple(accumulate((bytes_of(stop - start) for start, stop in ranges), initial=0))
            size = chunk_offsets[-1]
            placed[kind].append(
                GroupPlace(
                    unit=unit,
                    unit_name=layout.name,
                    kind=kind,
                    slot_offsets=(offset, offset + size),
                    chunk_offsets=chunk_offsets,
                )
            )
            offset += 2 * size
    return Places(weights=tuple(placed[GroupKind.WEIGHTS]), states=tuple(placed[GroupKind.STATES]), durable_bytes=offset)
