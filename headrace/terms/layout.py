"""How the parameters of a unit lie in flat buffers, and which planes there are.

A *unit* is what is fetched, drained, updated and committed as one: the prologue, one block, or the epilogue of a model
(docs/architecture.md). All its parameters lie in one flat range of `num_elements` elements, the same range in every plane.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Protocol, Self, TypeVar

from headrace.terms.errors import ConfigError
from headrace.terms.sizes import PAGE_BYTES, round_up

# Each parameter begins at a multiple of so many elements: 64 bytes in a 2-byte plane, a cache line and an AVX-512 register.
PARAMETER_ALIGNMENT = 32
# Each unit and each chunk begins at a multiple of so many elements: 4 KiB in a 2-byte plane, which O_DIRECT needs.
UNIT_ALIGNMENT = 2048


@dataclass(frozen=True, slots=True)
class Plane:
    """One number for every `elements_per_value` parameters. `dtype` is a NumPy name; bfloat16 bits are `uint16`.

    `bytes_per_element` are the bytes of one number.

    `of` says what has a number in the plane, under a rule of rows or matrices (*items*, `terms.cuts`). `element`: each element.
    `sides`: the rows and the columns of each item, or its columns alone if it is one row. `alone`: elements that are in no
    item. For the last two `terms.cuts.num_values` counts the numbers, which are at most as many as the elements.
    """

    name: str
    dtype: str
    bytes_per_element: int
    elements_per_value: int = 1
    of: str = "element"

    def num_values(self, num_elements: int) -> int:
        """Numbers that the plane has for `num_elements` parameters."""
        return -(-num_elements // self.elements_per_value)

    def num_bytes(self, num_elements: int) -> int:
        """Bytes that the plane has for `num_elements` parameters."""
        return self.num_values(num_elements) * self.bytes_per_element

    def part(self, start: int, stop: int) -> slice:
        """Return where the numbers of elements `[start, stop)` lie; both are multiples of `elements_per_value`."""
        return slice(start // self.elements_per_value, self.num_values(stop))


@dataclass(frozen=True, slots=True)
class PlaneSet:
    """The planes of one compute dtype: the weights that compute uses, and the states that only the update touches.

    States begin with what completes the weights to their fp32 master, unless the weights are the master; then come the rule's
    own.
    """

    compute_dtype: str
    weight: Plane
    states: tuple[Plane, ...]

    def state_bytes(self, num_elements: int) -> int:
        """Bytes of the planes that only the update touches, for a chunk of so many parameters, in whole pages."""
        return round_up(sum(plane.num_bytes(num_elements) for plane in self.states), PAGE_BYTES)

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of all planes together."""
        return self.weight.num_bytes(num_elements) + self.state_bytes(num_elements)

    def split_states(self, num_elements: int) -> Iterator[tuple[Plane, slice]]:
        """Yield each state plane and where its bytes lie in a chunk: back to back, in order."""
        start = 0
        for plane in self.states:
            stop = start + plane.num_bytes(num_elements)
            yield plane, slice(start, stop)
            start = stop

    @property
    def block_elements(self) -> int:
        """Elements that share a number, by which every cut of a unit must be aligned: 1 where none do."""
        return max((plane.elements_per_value for plane in self.states), default=1)

    @property
    def parameter_alignment(self) -> int:
        """Elements by which each parameter is aligned, so that no block has elements of two parameters."""
        return max(PARAMETER_ALIGNMENT, self.block_elements)


def rest_of_master(states: Sequence[Plane]) -> Plane | None:
    """Return the state plane that completes the weights to their fp32 master: the first; None where they are the master."""
    return states[0] if states and states[0].name in ("lo", "w") else None


# What completes the weights of a compute dtype to their fp32 master. bfloat16: the weight is the upper half
# of the master, `lo` the remainder: nothing is stored twice.
_MASTERS = {
    "bfloat16": (Plane("hi", "uint16", 2), (Plane("lo", "int16", 2),)),
    "float32": (Plane("w", "float32", 4), ()),
    "float16": (Plane("w16", "float16", 2), (Plane("w", "float32", 4),)),
}
COMPUTE_DTYPES = tuple(_MASTERS)


@cache
def planes_with(compute_dtype: str, states: tuple[Plane, ...]) -> PlaneSet:
    """Return the planes of a compute dtype under a rule that keeps `states`.

    Raises:
        ConfigError: the compute dtype is not known.
    """
    if compute_dtype not in _MASTERS:
        raise ConfigError(f"compute_dtype: {compute_dtype!r} is not one of {', '.join(_MASTERS)}")
    weight, rest = _MASTERS[compute_dtype]
    return PlaneSet(compute_dtype, weight, rest + states)


# Kinds of parameters that their shapes do not tell: a weight that its module only multiplies element by element, as norms do.
# And one that no input reaches, or that the model itself freezes.
SCALE, FROZEN = "scale", "frozen"


def is_matrix(name: str, num_dimensions: int, kind: str = "") -> bool:
    """Return whether a parameter is a matrix, or a stack of them: no vector, norm or bias, and nothing that is frozen.

    `kind` is `SCALE`, `FROZEN`, or "" where its shape and its own name tell all.
    """
    return num_dimensions >= 2 and not name.endswith("bias") and not kind


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter inside a unit: its place is elements `[offset, offset + num_elements)` of each plane.

    `kind` is as in `is_matrix`.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    num_elements: int
    group: int
    kind: str = ""

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or a stack of them."""
        return is_matrix(self.name, len(self.shape), self.kind)


class _Sliced(Protocol):
    """A flat array or tensor."""

    def __getitem__(self, elements: slice, /) -> Self: ...


_Flat = TypeVar("_Flat", bound=_Sliced)


def part(flat: _Flat, spec: ParameterSpec) -> _Flat:
    """Return a parameter's elements of a plane of its unit, an array or a tensor, as a view."""
    return flat[spec.offset : spec.offset + spec.num_elements]


@dataclass(frozen=True, slots=True)
class GroupRange:
    """Elements `[start, stop)` of a unit that share weight decay and learning-rate factor."""

    start: int
    stop: int
    learning_rate_scale: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Padding(GroupRange):
    """What lies between a parameter of items and the next one, where planes have no numbers for it. Nothing updates it."""


@dataclass(frozen=True, slots=True)
class ItemRange(GroupRange):
    """A range of items of `rows` times `columns` elements, one after another: whole rows or whole matrices of a parameter."""

    rows: int
    columns: int

    @property
    def item_elements(self) -> int:
        """Elements of one item."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Names, shapes and places of a unit's parameters. `num_elements` includes the padding."""

    name: str
    parameters: tuple[ParameterSpec, ...]
    groups: tuple[GroupRange, ...]
    num_elements: int

    @property
    def num_parameters(self) -> int:
        """Number of parameters without padding."""
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds of those parameters whose shapes do not tell them."""
        return {parameter.name: parameter.kind for parameter in self.parameters if parameter.kind}


def lay_out(
    name: str,
    parameters: list[tuple[str, tuple[int, ...], tuple[float, float]]],
    parameter_alignment: int = PARAMETER_ALIGNMENT,
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> UnitLayout:
    """Place `(name, shape, (learning_rate_scale, weight_decay))` so that each group is one contiguous range.

    Groups come in order of first appearance, parameters in the order given, each at a multiple of `parameter_alignment`.
    `kinds` are those that shapes do not tell.
    """
    keys = list(dict.fromkeys(key for _, _, key in parameters))
    placed: list[ParameterSpec] = []
    groups: list[GroupRange] = []
    offset = 0
    for index, key in enumerate(keys):
        start = offset
        for parameter_name, shape, parameter_key in parameters:
            if parameter_key == key:
                num_elements = 1
                for extent in shape:
                    num_elements *= extent
                kind = kinds.get(parameter_name, "")
                placed.append(ParameterSpec(parameter_name, tuple(shape), offset, num_elements, index, kind))
                offset += round_up(num_elements, parameter_alignment)
        if index == len(keys) - 1:
            offset = round_up(offset, UNIT_ALIGNMENT)
        groups.append(GroupRange(start, offset, *key))
    return UnitLayout(name, tuple(placed), tuple(groups), offset)


def realigned(layout: UnitLayout, parameter_alignment: int, without: frozenset[str] = frozenset()) -> UnitLayout:
    """Return the same parameters, in the same order and groups, laid out with another alignment, `without` those so named."""
    keys = [(group.learning_rate_scale, group.weight_decay) for group in layout.groups]
    kept = (parameter for parameter in layout.parameters if parameter.name not in without)
    parameters = [(parameter.name, parameter.shape, keys[parameter.group]) for parameter in kept]
    return lay_out(layout.name, parameters, parameter_alignment, layout.kinds)


# Ranges `[start, stop)` of a unit's elements, ascending.
Runs = tuple[tuple[int, int], ...]


def cut_out(layout: UnitLayout, names: frozenset[str]) -> tuple[UnitLayout, Runs]:
    """Return a unit without the parameters of these names, and which elements of the whole unit are left: in this order they
    lie one after another in it. Nothing is updated by its layout, so it has no groups.
    """
    ends = (*(spec.offset for spec in layout.parameters[1:]), layout.num_elements)
    kept: list[ParameterSpec] = []
    runs: list[tuple[int, int]] = []
    offset = 0
    for spec, end in zip(layout.parameters, ends, strict=True):
        if spec.name in names:
            continue
        kept.append(replace(spec, offset=offset))
        offset += end - spec.offset
        joins = bool(runs) and runs[-1][1] == spec.offset
        runs = [*runs[:-1], (runs[-1][0], end)] if joins else [*runs, (spec.offset, end)]
    return UnitLayout(layout.name, tuple(kept), (), offset), tuple(runs)


def chunk_ranges(num_elements: int, chunk_elements: int) -> list[tuple[int, int]]:
    """Return the `(start, stop)` element ranges in which a unit of `num_elements` is updated."""
    return [(start, min(start + chunk_elements, num_elements)) for start in range(0, num_elements, chunk_elements)]
