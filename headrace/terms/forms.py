"""The form of a unit: which parts lie on the drives and how, which part is trained, and what its compute slot is made of.

Three things are told apart. A unit trained *in place* has its weights and their states in families of one layout. Compute
reads, and the update changes, exactly the bytes that come from the drive. A *frozen* unit has weights alone, written once. A
unit with a *trained family of its own* has frozen weights, too. Gradients, states and updates belong to the small family beside
them: a subspace or an adapter. Its compute slot is made of both. Frozen weights may be *coded*: then the slot is decoded from
them. A trained family may be of a subspace that changes. Then its *basis* lies beside it, and the frozen weights have a
remainder that completes their fp32 master. Whenever the basis changes, they are merged with the trained family
(`flow.step.settle`). A unit may be *far*: weights and states live at another site, from which weights
are pulled and to which gradients are pushed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from headrace.terms.coding import CodedUnit, Decodes, decodes_of
from headrace.terms.cuts import Cuts, cuts_of
from headrace.terms.embedding_rows import TableFigures
from headrace.terms.errors import ConfigError
from headrace.terms.families import (
    BASIS,
    NEXT_BASIS,
    REST,
    STATES,
    TRAINED,
    WEIGHTS,
    Durability,
    Family,
    Unit,
    cut,
    trained_unit,
)
from headrace.terms.layout import Plane, PlaneSet, UnitLayout, rest_of_master
from headrace.terms.rule_figures import RuleFigures

# Where a unit's weights live between uses: on the drives, to be fetched for each pass, or where compute reads them. A unit that
# is away is another stage's.
SSD, DEVICE, AWAY = "ssd", "device", "away"
_BASIS_PLANES = (Plane("basis", "float32", 4),)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFigures:
    """A unit as a plan sees it: elements with padding, parameters without.

    Attributes:
        num_elements: elements of the slot that compute reads.
        home: `SSD` or `DEVICE`: where the weights live between uses; `AWAY`: not here.
        trained_elements: elements of what is updated: 0 for a frozen unit, None where all of the unit is updated in place.
        stored_bytes: bytes of coded weights on the drive; None where they are not coded.
        making_bytes: the most bytes that making a slot allocates for a moment, on the device that computes.
        decodes: the weights that are decoded for it, by kind of code.
        making_like: bytes that a machine moves while it decodes them, at the rate of its lane that makes weights
            (`plan.value.decoding.making_like`).
        packed_bytes: bytes of its matrices that stay in their codes, by which products of few rows multiply; 0 where none do.
        packed_weights: the weights of these.
        packing_bytes: bytes that copies of these take for torch's kernel, where they stay in memory; 0 where it takes none.
        cuts: where what is updated may be cut into chunks; (): anywhere.
        is_far: whether its weights and states live at another site, which updates it.
        basis_elements: float32 numbers of the basis of the trained family's subspace; 0 where there is none.
        is_beside: whether compute reads the trained family beside the frozen weights, which stay as they are.
    """

    name: str
    num_elements: int
    num_parameters: int
    home: str
    trained_elements: int | None = None
    stored_bytes: int | None = None
    making_bytes: int = 0
    decodes: Decodes = ()
    making_like: int = 0
    cuts: tuple[Cuts, ...] = ()
    is_far: bool = False
    basis_elements: int = 0
    is_beside: bool = False
    packed_bytes: int = 0
    packed_weights: int = 0
    packing_bytes: int = 0

    def away(self) -> "UnitFigures":
        """Return the unit as a stage sees it that does not have it: nothing of it is here."""
        return UnitFigures(name=self.name, num_elements=0, num_parameters=self.num_parameters, home=AWAY, trained_elements=0)

    @property
    def in_place(self) -> bool:
        """Whether the update changes the weights that are fetched."""
        return self.trained_elements is None

    @property
    def kind(self) -> tuple[str, bool, bool, bool, bool]:
        """What two units must have in common for a schedule to treat them alike; their sizes may differ."""
        return self.home, self.in_place, self.is_trained, self.stored_bytes is not None, self.is_far

    @property
    def gradient_elements(self) -> int:
        """Elements of its gradient: 0 for a frozen unit."""
        return self.num_elements if self.trained_elements is None else self.trained_elements

    @property
    def update_elements(self) -> int:
        """Elements that are updated on this machine: 0 for a frozen unit, and for one that is updated elsewhere."""
        return 0 if self.is_far else self.gradient_elements

    @property
    def is_trained(self) -> bool:
        """Whether anything of it is updated."""
        return self.gradient_elements > 0

    @property
    def has_own_family(self) -> bool:
        """Whether what is trained is a family of its own, beside frozen weights."""
        return self.trained_elements is not None and self.trained_elements > 0

    @property
    def is_made(self) -> bool:
        """Whether its compute slot is made, from coded weights or with a trained family, and not just read."""
        return self.stored_bytes is not None or self.is_completed

    @property
    def is_completed(self) -> bool:
        """Whether its compute slot is completed with a trained family of its own."""
        return self.has_own_family and not self.is_beside


def merged(units: Sequence[UnitFigures]) -> UnitFigures:
    """Return the figures of one unit that is as much work as `units`, all of one `kind`: for a coarser plan."""
    first, starts = units[0], accumulate((unit.gradient_elements for unit in units), initial=0)
    cuts = [
        each._replace(start=each.start + start, stop=each.stop + start)
        for unit, start in zip(units, starts, strict=False)
        for each in unit.cuts
    ]
    return replace(
        first,
        num_elements=sum(unit.num_elements for unit in units),
        num_parameters=sum(unit.num_parameters for unit in units),
        trained_elements=None if first.in_place else sum(unit.gradient_elements for unit in units),
        stored_bytes=None if first.stored_bytes is None else sum(unit.stored_bytes or 0 for unit in units),
        making_bytes=max(unit.making_bytes for unit in units),
        making_like=sum(unit.making_like for unit in units),
        basis_elements=sum(unit.basis_elements for unit in units),
        cuts=tuple(cuts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of one unit.

    Attributes:
        layout: the layout of the slot that compute reads.
        trained: the layout of what is updated: `layout` itself in place, another one for a family of its own, None if frozen.
        code: where the parts of coded weights lie; None where they lie as compute reads them.
        home: as in `UnitFigures`; `making_bytes` and `cuts` likewise.
        basis: the layout of the numbers that define a trained family's subspace; None where there is no subspace that changes.
        left: names of parameters that stay as they are beside those that are trained; no gradient of them is taken.
        is_beside: as in `UnitFigures`.
        is_lent: its frozen weights are read in the model's own files, in which `layout` says where they lie.
        table: the table beside it whose rows are read and updated one by one; None where there is none.

    Raises:
        ConfigError: a slot would have to be made that lives on the device, is trained in place, or is far. None is
            made where what is trained is computed beside the weights.
    """

    layout: UnitLayout
    trained: UnitLayout | None
    home: str
    code: CodedUnit | None = None
    making_bytes: int = 0
    cuts: tuple[Cuts, ...] = ()
    is_far: bool = False
    basis: UnitLayout | None = None
    left: frozenset[str] = frozenset()
    is_beside: bool = False
    is_lent: bool = False
    table: TableFigures | None = None

    def __post_init__(self) -> None:
        if self.is_far and (self.code or not self.in_place):
            raise ConfigError(
                f"unit {self.layout.name}: lives at another site, which updates all of it. It can be neither frozen, nor "
                "coded, nor completed by a trained family of its own"
            )
        if (self.code or (self.has_own_family and not self.is_beside)) and (self.home == DEVICE or self.in_place):
            raise ConfigError(
                f"unit {self.layout.name}: {('is trained in place' if self.in_place else 'lives on the device')}, so its "
                "weights can be neither coded nor completed by a trained family of its own. Leave it as it is, or freeze it"
            )

        if self.basis is not None and self.code is not None:
            raise ConfigError(
                f"unit {self.layout.name}: its weights are coded, and would be merged with the trained family when the basis "
                "changes. Leave them as they are, or train no subspace"
            )

    @property
    def in_place(self) -> bool:
        """Whether the update changes the weights that are fetched."""
        return self.trained is not None and self.trained is self.layout

    @property
    def has_own_family(self) -> bool:
        """Whether what is trained is a family of its own."""
        return self.trained is not None and self.trained is not self.layout

    @property
    def is_completed(self) -> bool:
        """Whether the slot is completed with what is trained."""
        return self.has_own_family and not self.is_beside

    @property
    def figures(self) -> UnitFigures:
        """What a plan knows of the unit."""
        trained = None if self.in_place else self.trained.num_elements if self.trained else 0
        return UnitFigures(
            name=self.layout.name,
            num_elements=self.layout.num_elements,
            num_parameters=self.layout.num_parameters,
            home=self.home,
            trained_elements=trained,
            stored_bytes=self.code.num_bytes if self.code else None,
            making_bytes=self.making_bytes,
            decodes=decodes_of((each.codec, each.rows * each.columns) for each in self.code.matrices) if self.code else (),
            cuts=self.cuts,
            is_far=self.is_far,
            basis_elements=self.basis.num_elements if self.basis else 0,
            is_beside=self.is_beside,
        )

    def families(self, planes: PlaneSet, own_planes: PlaneSet, chunk_elements: int) -> Unit:
        """Return the unit as a store has it; `own_planes` are those of a trained family of its own."""
        if self.is_far:
            family = cut(WEIGHTS, self.layout, (planes.weight,), chunk_elements, Durability.MEMORY)
            return Unit(self.layout.name, (family,))
        if self.in_place:
            return trained_unit(self.layout, planes, chunk_elements, self.cuts)
        stored = self.code.plane(self.layout.num_elements) if self.code else planes.weight
        size = self.layout.num_elements if self.code else chunk_elements
        durability = Durability.ONCE if self.basis is None else Durability.TWO_SLOTS
        durability = Durability.LENT if self.is_lent else durability
        families = [cut(WEIGHTS, self.layout, (stored,), size, durability)]
        if self.basis is not None:
            families += self._basis_families(self.basis, rest_of_master(planes.states), chunk_elements)
        if self.trained is not None:
            how = chunk_elements, Durability.TWO_SLOTS, self.cuts
            families.append(cut(TRAINED, self.trained, (own_planes.weight,), *how))
            if own_planes.states:
                families.append(cut(STATES, self.trained, own_planes.states, *how))
        return Unit(self.layout.name, tuple(families))

    def _basis_families(self, basis: UnitLayout, rest: Plane | None, chunk_elements: int) -> list[Family]:
        """Return the families beside weights that are merged from time to time: both bases, and the rest of the master."""
        how = chunk_elements, Durability.TWO_SLOTS
        families = [cut(name, basis, _BASIS_PLANES, *how) for name in (BASIS, NEXT_BASIS)]
        return [*families, cut(REST, self.layout, (rest,), *how)] if rest else families


def in_place_forms(layouts: Sequence[UnitLayout], num_blocks: int, rule: RuleFigures) -> tuple[Form, ...]:
    """Return the forms of full fine-tuning under `rule`: every unit is trained in place, and only blocks leave the device."""
    return tuple(
        Form(layout=layout, trained=layout, home=home_of(unit, num_blocks), cuts=cuts_of(layout, rule))
        for unit, layout in enumerate(layouts)
    )


def home_of(unit: int, num_blocks: int) -> str:
    """Return where a unit's weights live unless it is planned otherwise: blocks are streamed, prologue and epilogue stay."""
    return SSD if 1 <= unit <= num_blocks else DEVICE
