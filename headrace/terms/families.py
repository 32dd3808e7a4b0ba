"""Units and their families: what is read, written and committed together, and what its place on the drives promises.

A *unit* is what a step walks through: the prologue, a block, the epilogue. Its planes come in *families*, each with a layout of
its own. A trained unit has two: the weights that compute uses, and the states that only updates touch. Each is read and written
at once. A frozen unit has weights alone; a rule without states needs no second family.

Invariant: the chunks of a family cover its elements in order, without gap or overlap.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from headrace.terms.cuts import Cuts, chunk_borders, is_uneven, state_bytes
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UNIT_ALIGNMENT, Plane, PlaneSet, UnitLayout
from headrace.terms.sizes import PAGE_BYTES

# The families that every trained unit may have; others name theirs.
WEIGHTS, STATES = "weights", "states"
# What is trained of a unit whose weights are frozen: a subspace, an adapter.
TRAINED = "trained"
# A unit may merge its frozen weights with its trained family from time to time. Such a unit has these families: the remainder
# of the weights' fp32 master, the basis of the trained subspace, and the basis that replaces it at the next merge.
REST, BASIS, NEXT_BASIS = "rest", "basis", "next basis"


class Durability(StrEnum):
    """What a family's place on the drives promises, and how many slots it takes there."""

    TWO_SLOTS = "two slots"  # each step writes the slot that is not committed; a commit makes it the newest
    ONCE = "once"  # one slot, written before the first commit and never again: frozen weights
    SCRATCH = "scratch"  # one slot that no commit names and no checksum covers: gone when the run is opened again
    MEMORY = "memory"  # no place on the drives
    LENT = "lent"  # in files that others keep, which are only read: frozen weights in a model's own files

    @property
    def slots(self) -> int:
        """Slots on the drives."""
        return {Durability.TWO_SLOTS: 2, Durability.ONCE: 1, Durability.SCRATCH: 1}.get(self, 0)

    @property
    def committed(self) -> bool:
        """Whether commits name it, with a checksum for each chunk."""
        return self in (Durability.TWO_SLOTS, Durability.ONCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Planes over the elements of `layout`, cut into chunks at `borders` (first 0, last `layout.num_elements`).

    In a chunk the planes lie back to back, in order, padded to whole pages. Chunks of whole parameters, or of whole rows,
    differ in their borders alone. `cuts` say how many numbers a chunk has in planes that do not have one for each element.
    `held` are the first chunk that this store holds and the first after them, where others hold the rest; None: all.

    Raises:
        ConfigError: the borders do not lead from 0 to the last element in ascending order.
    """

    name: str
    layout: UnitLayout
    borders: tuple[int, ...]
    planes: tuple[Plane, ...]
    durability: Durability = Durability.TWO_SLOTS
    cuts: tuple[Cuts, ...] = ()
    held: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        ascending = all(start < stop for start, stop in self.chunks)
        if not self.borders or self.borders[0] != 0 or self.borders[-1] != self.layout.num_elements or not ascending:
            raise ConfigError(
                f"unit {self.layout.name}, {self.name}: chunk borders must ascend from 0 to element "
                f"{self.layout.num_elements}, found {self.borders[:4]} to {self.borders[-1:]}"
            )

    @property
    def chunks(self) -> Iterator[tuple[int, int]]:
        """The `(start, stop)` element ranges, in order."""
        return zip(self.borders, self.borders[1:], strict=False)

    @property
    def num_chunks(self) -> int:
        """Chunks of the family."""
        return len(self.borders) - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks: one slot."""
        return sum(self.chunk_bytes(chunk) for chunk in range(self.num_chunks))

    @property
    def held_chunks(self) -> range:
        """The chunks that this store holds."""
        return range(*self.held) if self.held is not None else range(self.num_chunks)

    def chunk_bytes(self, chunk: int) -> int:
        """Bytes of one chunk, in whole pages."""
        return state_bytes(self.planes, self.borders[chunk], self.borders[chunk + 1], self.cuts)


@dataclass(frozen=True, slots=True)
class Unit:
    """A prologue, block or epilogue, and its families.

    Raises:
        ConfigError: two families of one name.
    """

    name: str
    families: tuple[Family, ...]

    def __post_init__(self) -> None:
        names = [family.name for family in self.families]
        if len(set(names)) != len(names):
            raise ConfigError(f"unit {self.name}: two families of one name among {', '.join(names)}")

    @property
    def weights(self) -> Family:
        """The family that compute uses: every unit has one.

        Raises:
            ConfigError: this one has none.
        """
        found = self.family(WEIGHTS)
        if found is None:
            raise ConfigError(f"unit {self.name}: has no family {WEIGHTS!r}, so nothing could compute with it")
        return found

    def family(self, name: str) -> Family | None:
        """Return the family of that name, or None: a frozen unit has no states."""
        return next((family for family in self.families if family.name == name), None)


def trained_unit(layout: UnitLayout, planes: PlaneSet, chunk_elements: int, cuts: tuple[Cuts, ...] = ()) -> Unit:
    """Return a unit whose weights are trained: its weights, and its states where the rule keeps any; both cut alike.

    `cuts` say where it may be cut, () anywhere.

    Raises:
        ConfigError: chunks or weights would leave gaps between pages; weights are read as a whole.
    """
    families = [cut(WEIGHTS, layout, (planes.weight,), chunk_elements, Durability.TWO_SLOTS, cuts)]
    if planes.states:
        families.append(cut(STATES, layout, planes.states, chunk_elements, Durability.TWO_SLOTS, cuts))
    return Unit(layout.name, tuple(families))


def cut(
    name: str,
    layout: UnitLayout,
    planes: tuple[Plane, ...],
    chunk_elements: int,
    durability: Durability,
    cuts: tuple[Cuts, ...] = (),
) -> Family:
    """Return a family over `layout` in chunks of at most `chunk_elements`, cut where `cuts` allow it; () is anywhere.

    Raises:
        ConfigError: chunks or weights would leave gaps between pages; weights are read as a whole.
    """
    if chunk_elements < UNIT_ALIGNMENT or chunk_elements % UNIT_ALIGNMENT:
        raise ConfigError(f"chunk of {chunk_elements} elements: expected a positive multiple of {UNIT_ALIGNMENT}")
    if layout.num_elements % UNIT_ALIGNMENT:
        raise ConfigError(f"unit {layout.name}: {layout.num_elements} elements, expected a multiple of {UNIT_ALIGNMENT}")
    several = chunk_elements < layout.num_elements
    if name == WEIGHTS and several and sum(plane.num_bytes(UNIT_ALIGNMENT) for plane in planes) % PAGE_BYTES:
        raise ConfigError(
            f"unit {layout.name}: {planes[0].bytes_per_element} bytes per weight, so that {UNIT_ALIGNMENT} elements are no "
            f"multiple of {PAGE_BYTES} bytes; use a plane whose size is even"
        )
    borders = chunk_borders(layout.num_elements, chunk_elements, cuts)
    counted = cuts if is_uneven(planes) else ()
    return Family(name=name, layout=layout, borders=borders, planes=planes, durability=durability, cuts=counted)
