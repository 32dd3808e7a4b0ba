"""Where each family of each unit lies in the volume: a value, computed once from the units.

A family has as many slots as its durability asks for; inside a slot its chunks follow one another. Behind the last slot begins
the scratch region. Invariant: slots do not overlap, and every chunk begins and ends on a border of 4096 bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from headrace.machine.host_memory import Bytes
from headrace.terms.errors import ConfigError, StorageError
from headrace.terms.families import Durability, Unit
from headrace.terms.layout import UNIT_ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # a key of tables: itself, not its content
class FamilyPlace:
    """The slots of a family. Chunk `k` lies at `slot_offsets[slot] + chunk_offsets[k]`; the last is the slot's size.

    Where others hold the rest of the family, these are its chunks from `first` on; `whole` has the sizes of all.
    """

    unit: int
    unit_name: str
    family: str
    durability: Durability
    slot_offsets: tuple[int, ...]
    chunk_offsets: tuple[int, ...]
    first: int = 0
    whole: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"unit {self.unit_name}, {self.family}"

    @property
    def num_chunks(self) -> int:
        """Chunks in the family."""
        return len(self.chunk_offsets) - 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of all chunks."""
        return self.chunk_offsets[-1]

    def chunk_bytes(self, chunk: int) -> int:
        """Bytes of one chunk."""
        return self.chunk_offsets[chunk + 1] - self.chunk_offsets[chunk]

    def own(self, chunk: int | None) -> range:
        """Return which of its chunks here are chunk `chunk` of the family, or all of it: none if others hold that."""
        here = range(self.num_chunks)
        return here if chunk is None else here[max(0, chunk - self.first) : max(0, chunk - self.first + 1)]

    def part(self, into: Bytes) -> Bytes:
        """Return those bytes of a buffer of the whole family that are held here."""
        start = sum(self.whole[: self.first])
        return into[start : start + self.slot_bytes] if self.whole else into

    def check_size(self, buffer: Bytes, expected_bytes: int) -> None:
        """Refuse a buffer of another size.

        Raises:
            StorageError: names both sizes.
        """
        if buffer.size != expected_bytes:
            raise StorageError(
                f"{self.label}: buffer of {buffer.size} bytes, expected {expected_bytes}; cut it to the chunk's size"
            )

    def offset(self, slot: int, chunk: int) -> int:
        """Volume offset of a chunk in a slot."""
        return self.slot_offsets[slot] + self.chunk_offsets[chunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The place of each family by unit and name, and where the scratch region begins."""

    families: Mapping[tuple[int, str], FamilyPlace]
    durable_bytes: int

    def is_lent(self, unit: int, family: str) -> bool:
        """Return whether a family lies in files that others keep."""
        place = self.families.get((unit, family))
        return place is not None and place.durability is Durability.LENT

    @property
    def committed(self) -> tuple[FamilyPlace, ...]:
        """Every family that commits name, in the order of the commit record: by family name as they first appear, then unit."""
        places = [place for place in self.families.values() if place.durability.committed]
        names = list(dict.fromkeys(place.family for place in places))
        return tuple(sorted(places, key=lambda place: (names.index(place.family), place.unit)))


def place_units(units: Sequence[Unit]) -> Places:
    """Place the slots of each family, one unit after another.

    Raises:
        ConfigError: borders of chunks that are no multiples of 2048 elements, so that some chunk would not begin on a page.
    """
    offset = 0
    placed: dict[tuple[int, str], FamilyPlace] = {}
    for index, unit in enumerate(units):
        for family in unit.families:
            odd = next((border for border in family.borders if border % UNIT_ALIGNMENT), None)
            if odd is not None:
                raise ConfigError(
                    f"unit {unit.name}, {family.name}: a chunk begins or ends at element {odd}; expected a multiple of "
                    f"{UNIT_ALIGNMENT}"
                )
            held, is_part = family.held_chunks, family.held is not None
            chunk_offsets = tuple(accumulate(map(family.chunk_bytes, held), initial=0))
            slots = family.durability.slots
            placed[index, family.name] = FamilyPlace(
                unit=index,
                unit_name=unit.name,
                family=family.name,
                durability=family.durability,
                slot_offsets=tuple(offset + slot * chunk_offsets[-1] for slot in range(slots)),
                chunk_offsets=chunk_offsets,
                first=held.start,
                whole=tuple(map(family.chunk_bytes, range(family.num_chunks))) if is_part else (),
            )
            offset += slots * chunk_offsets[-1]
    return Places(families=placed, durable_bytes=offset)
