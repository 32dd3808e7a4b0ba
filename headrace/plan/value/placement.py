"""What every plan says about weights, in training and in generation: how large units are, and how they come to compute."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from headrace.plan.value.results import Results
from headrace.terms.forms import AWAY, DEVICE, UnitFigures
from headrace.terms.layout import PlaneSet, Runs, planes_with
from headrace.terms.sizes import MIB, PAGE_BYTES, round_up

# Pages of weights are at least this large.
LEAST_PAGE_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """Bytes of a plan's weights that follow from its units.

    `slot`, `stored` and `source` are the most that a block has, `stored_of_blocks` is the sum of all blocks. `streamed` is the
    most that any unit has that is fetched. `resident` is the sum of units that stay, and `coming` the most that one of these
    has as it is stored. Those of `trained` families are by unit; `slots` say how many blocks have slots of a size.
    """

    slot: int
    stored: int
    stored_of_blocks: int
    source: int
    streamed: int
    resident: int
    coming: int
    resident_is_made: bool
    trained: tuple[tuple[int, int], ...]
    slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Units are: 0 the prologue, 1..num_blocks the blocks, then (if there is one) the epilogue.

    `host_slots` blocks are in host memory, and `device_slots` where compute reads them, if that is other memory or slots are
    made. They come `prefetch` blocks ahead. `results` are what was found about the plan's choices.
    """

    compute_dtype: str
    separate_device: bool
    units: tuple[UnitFigures, ...]
    num_blocks: int
    host_slots: int
    device_slots: int
    prefetch: int
    compute_threads: int
    results: Results = field(default_factory=Results)

    @property
    def planes(self) -> PlaneSet:
        """The weights' plane among others."""
        return planes_with(self.compute_dtype, ())

    @property
    def has_epilogue(self) -> bool:
        """Whether parameters are used after the blocks only (false for some tied models)."""
        return len(self.units) == self.num_blocks + 2

    @property
    def ends(self) -> tuple[int, ...]:
        """The units around the blocks, prologue and epilogue; a tied head uses both."""
        return (0, self.num_blocks + 1) if self.has_epilogue else (0,)

    @property
    def resident_units(self) -> tuple[int, ...]:
        """The units whose weights stay where compute reads them: prologue, epilogue, and blocks whose home is the device."""
        return tuple(index for index, unit in enumerate(self.units) if unit.home == DEVICE)

    @property
    def streamed_units(self) -> tuple[int, ...]:
        """The units whose weights are fetched for each pass: blocks, or at a node all units."""
        return tuple(index for index, unit in enumerate(self.units) if unit.home not in (DEVICE, AWAY))

    @property
    def own_blocks(self) -> range:
        """The units of those blocks that are here: all, but for a stage."""
        here = [block for block in range(1, self.num_blocks + 1) if self.units[block].home != AWAY]
        return range(here[0], here[-1] + 1)

    @property
    def far_units(self) -> tuple[int, ...]:
        """The units that live at another site."""
        return tuple(index for index, unit in enumerate(self.units) if unit.is_far)

    @property
    def makes_slots(self) -> bool:
        """Whether a block's slot is made of what is read, and not just read."""
        return any(unit.is_made for unit in self.units[1 : self.num_blocks + 1])

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return sum(unit.num_parameters for unit in self.units)

    def slot_runs(self, unit: int) -> Runs:
        """Which elements of a unit's weights lie, one after another, in the slot that compute reads: all."""
        return ((0, self.units[unit].num_elements),)

    def slot_elements(self, unit: int) -> int:
        """Elements of the slot that compute reads."""
        return sum(stop - start for start, stop in self.slot_runs(unit))

    def slot_bytes(self, unit: int) -> int:
        """Bytes of a unit's weights as compute reads them."""
        return self.planes.weight.num_bytes(self.slot_elements(unit))

    def resident_bytes(self, unit: int) -> int:
        """Bytes that a unit takes where it stays: whole pages."""
        return round_up(self.slot_bytes(unit), PAGE_BYTES)

    def stored_bytes(self, unit: int) -> int:
        """Bytes of a unit's weights on the drive, and so in host memory: these are fetched."""
        figures = self.units[unit]
        return figures.stored_bytes or self.planes.weight.num_bytes(figures.num_elements)

    def trained_bytes(self, unit: int) -> int:
        """Bytes of the weights of a trained family of its own, float32: 0 where there is none."""
        figures = self.units[unit]
        return 4 * figures.update_elements if figures.has_own_family else 0

    def basis_bytes(self, unit: int) -> int:
        """Bytes of the basis of a trained family: 0 where there is none."""
        return 4 * self.units[unit].basis_elements

    def completing_bytes(self, unit: int) -> int:
        """Bytes with which frozen weights are completed: those of a trained family of its own, and of its basis."""
        return self.trained_bytes(unit) + self.basis_bytes(unit)

    @property
    def units_with_family(self) -> tuple[int, ...]:
        """The units beside whose weights host memory has a trained family of their own."""
        return tuple(unit for unit, figures in enumerate(self.units) if figures.update_elements and self.completing_bytes(unit))

    def source_bytes(self, unit: int) -> int:
        """Bytes from which a slot is made, besides plain weights that are read into it: coded weights, and trained ones."""
        figures = self.units[unit]
        return (figures.stored_bytes or 0) + (self.completing_bytes(unit) if figures.is_completed else 0)

    def sent_bytes(self, unit: int) -> int:
        """Bytes that cross the link for a unit's weights: these, or what they are made of."""
        figures = self.units[unit]
        sent = figures.stored_bytes or self.slot_bytes(unit)
        return sent + (self.completing_bytes(unit) if figures.is_completed else 0)

    def page_bytes(self, unit: int) -> int:
        """Bytes of a piece in which a block's weights cross the link: all of them at once."""
        return self.sent_bytes(unit)

    def page_of(self, unit: int, count: int) -> int:
        """Bytes of a piece in which a block's weights cross the link, where `count` are enough; small ones are joined."""
        return max(LEAST_PAGE_BYTES, round_up(-(-self.sent_bytes(unit) // count), PAGE_BYTES))

    @property
    def weight_sizes(self) -> WeightSizes:
        """What follows from units alone."""
        return weight_sizes_of(self)

    def largest(self, of: Callable[[int], int]) -> int:
        """Return the most that `of(unit)` is for any block."""
        return max(map(of, range(1, self.num_blocks + 1)))

    def peak(self, tier: str) -> int:
        """Planned peak bytes of a tier."""
        return sum(self.results.peak_bytes.get(tier, {}).values())

    @property
    def excess_bytes(self) -> dict[str, int]:
        """By tier, the bytes by which its peak exceeds what is allowed: {} of a plan that fits."""
        allowed = self.results.allowed_bytes
        return {tier: self.peak(tier) - most for tier, most in allowed.items() if self.peak(tier) > most}

    @property
    def fits(self) -> bool:
        """Whether the peaks are within what each tier allows."""
        return not self.excess_bytes

    def with_results(self, **changes: Any) -> Self:
        """Return the plan with these of its results changed."""
        return replace(self, results=replace(self.results, **changes))

    def with_notes(self, notes: Sequence[str]) -> Self:
        """Return the plan with these notes besides its own, each once."""
        return self.with_results(notes=tuple(dict.fromkeys((*self.results.notes, *notes))))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values; what every plan has is under `placement`."""
        values = asdict(self) | {"results": self.results.to_json()}
        return {"placement": {shared.name: values.pop(shared.name) for shared in fields(Placement)}, **values}


def weight_sizes_of(plan: Placement) -> WeightSizes:
    """Return the bytes of a plan's weights that follow from its units."""
    residents = plan.resident_units
    return WeightSizes(
        slot=plan.largest(plan.slot_bytes),
        stored=plan.largest(plan.stored_bytes),
        stored_of_blocks=sum(map(plan.stored_bytes, range(1, plan.num_blocks + 1))),
        source=plan.largest(plan.source_bytes),
        streamed=max(map(plan.stored_bytes, plan.streamed_units), default=0),
        resident=sum(map(plan.resident_bytes, residents)),
        coming=max(map(plan.stored_bytes, residents), default=0),
        resident_is_made=any(plan.units[unit].is_made for unit in residents),
        trained=tuple((unit, plan.completing_bytes(unit)) for unit in plan.units_with_family),
        slots=tuple(Counter(map(plan.slot_bytes, range(1, plan.num_blocks + 1))).items()),
    )
