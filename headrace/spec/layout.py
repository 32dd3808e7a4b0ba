"""How the parameters of a unit lie in flat buffers, and which planes there are.

A *unit* is what is fetched, drained, updated and committed as one: the prologue, one block, or the epilogue of a model
(design section 3). All its parameters lie in one flat range of `num_elements` elements, the same range in every plane.
"""

from dataclasses import dataclass

# Elements by which each parameter is aligned: 64 bytes in a 2-byte plane, a cache line and an AVX-512 register.
PARAMETER_ALIGNMENT = 32
# Elements by which a unit, and every chunk of it, is aligned: 4 KiB in a 2-byte plane, what O_DIRECT needs.
UNIT_ALIGNMENT = 2048


@dataclass(frozen=True, slots=True)
class Plane:
    """One number per parameter. `dtype` is a NumPy name; bfloat16 bits are `uint16`."""

    name: str
    dtype: str
    bytes_per_element: int


@dataclass(frozen=True, slots=True)
class PlaneSet:
    """The planes of one compute dtype: the weights that compute uses, and the states that only the update touches."""

    compute_dtype: str
    weight: Plane
    states: tuple[Plane, ...]

    @property
    def state_bytes_per_element(self) -> int:
        """Bytes of the planes that only the update touches."""
        return sum(plane.bytes_per_element for plane in self.states)

    @property
    def bytes_per_element(self) -> int:
        """Bytes of all planes together: 12 for bfloat16."""
        return self.weight.bytes_per_element + self.state_bytes_per_element


_M, _V = Plane("m", "float32", 4), Plane("v", "float32", 4)

# Design section 4. bfloat16: the weight is the upper half of the fp32 master, `lo` the remainder: nothing is stored twice.
PLANE_SETS = {
    "bfloat16": PlaneSet("bfloat16", Plane("hi", "uint16", 2), (Plane("lo", "int16", 2), _M, _V)),
    "float32": PlaneSet("float32", Plane("w", "float32", 4), (_M, _V)),
    "float16": PlaneSet("float16", Plane("w16", "float16", 2), (Plane("w", "float32", 4), _M, _V)),
}


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter inside a unit: its place is elements `[offset, offset + num_elements)` of each plane."""

    name: str
    shape: tuple[int, ...]
    offset: int
    num_elements: int
    group: int


@dataclass(frozen=True, slots=True)
class GroupRange:
    """Elements `[start, stop)` of a unit that share weight decay and learning-rate factor."""

    start: int
    stop: int
    learning_rate_scale: float
    weight_decay: float


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


def lay_out(name: str, parameters: list[tuple[str, tuple[int, ...], tuple[float, float]]]) -> UnitLayout:
    """Place `(name, shape, (learning_rate_scale, weight_decay))` so that each group is one contiguous range.

    Groups come in order of first appearance, parameters in the order given.
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
                placed.append(ParameterSpec(parameter_name, tuple(shape), offset, num_elements, index))
                offset += -(-num_elements // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        if index == len(keys) - 1:
            offset = -(-offset // UNIT_ALIGNMENT) * UNIT_ALIGNMENT
        groups.append(GroupRange(start, offset, *key))
    return UnitLayout(name, tuple(placed), tuple(groups), offset)


def chunk_ranges(num_elements: int, chunk_elements: int) -> list[tuple[int, int]]:
    """Return the `(start, stop)` element ranges in which a unit of `num_elements` is updated."""
    return [(start, min(start + chunk_elements, num_elements)) for start in range(0, num_elements, chunk_elements)]
