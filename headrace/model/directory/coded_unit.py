"""A unit whose matrices stay in their codes: the bytes that were read are the slot, and what is bound lies there.

Other parameters are views of these bytes if compute can read them so; small ones that it cannot are made anew for each bind.

Invariant: a unit has all its parameters as operands, views or made ones, or it is not such a unit.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch

from headrace.codec.published import PackQuantized
from headrace.codec.published.lines import HasLines
from headrace.codec.published.packed import is_packable, packed_bytes
from headrace.model.directory.in_place import StoredUnit
from headrace.model.stored.decoding import Decoding
from headrace.model.stored.operand import CodedOperand, Workspace
from headrace.terms.layout import ParameterSpec, lay_out

# Parameters that are made for each bind have no more elements together: they are vectors.
_MOST_MADE = 1 << 18


@dataclass(frozen=True, slots=True)
class UnitInCodes:
    """`stored` has the layout of the bytes read, in the compute dtype. `views` lie there, `made` are placed or decoded."""

    stored: StoredUnit
    views: tuple[ParameterSpec, ...]
    made: StoredUnit
    operands: tuple[tuple[ParameterSpec, Decoding], ...]

    @property
    def weights(self) -> int:
        """Weights that stay in their codes."""
        return sum(spec.num_elements for spec, _ in self.operands)

    @property
    def coded_bytes(self) -> int:
        """Bytes of these."""
        return sum(place.num_bytes for _, decoding in self.operands for place in decoding.parts.values())

    def packing_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that packed copies of matrices take, for torch's kernel."""
        return sum(self._packed(dtype))

    def making_bytes(self, dtype: torch.dtype) -> int:
        """Return the most bytes that products and a bind allocate at once: the workspace, decoding into it, a packed copy."""
        largest = max(spec.num_elements for spec, _ in self.operands) + self.made.layout.num_elements
        most = max(decoding.making_bytes(dtype) for _, decoding in self.operands)
        return largest * dtype.itemsize + max(most, self.made.making_bytes(dtype), *self._packed(dtype))

    def _packed(self, dtype: torch.dtype) -> list[int]:
        return [
            packed_bytes(each.rows, each.columns, each.codec.group)
            if isinstance(each.codec, PackQuantized) and is_packable(each.codec, each.rows, each.columns, dtype)
            else 0
            for _, each in self.operands
        ]

    def parameters(self, flat: torch.Tensor, workspace: Workspace) -> Iterator[tuple[str, torch.Tensor | CodedOperand]]:
        """Yield all parameters by name, of the slot `flat`."""
        read = flat.view(torch.uint8)
        for spec, decoding in self.operands:
            yield spec.name, CodedOperand(decoding, read, spec.shape, workspace)
        for spec in self.views:
            yield spec.name, flat[spec.offset : spec.offset + spec.num_elements].view(spec.shape)
        if self.made.layout.parameters:
            made = torch.empty(self.made.layout.num_elements, dtype=flat.dtype, device=flat.device)
            self.made.put(read, made)
            for spec in self.made.layout.parameters:
                yield spec.name, made[spec.offset : spec.offset + spec.num_elements].view(spec.shape)


def as_coded(unit: StoredUnit, dtype: torch.dtype, may_stay: Collection[str]) -> UnitInCodes | None:
    """Return how the matrices of `unit` stay in their codes, for compute in `dtype`; None where some cannot.

    `may_stay` are the names of those that an architecture only multiplies by.
    """
    specs = {spec.offset: spec for spec in unit.layout.parameters}
    operands = tuple(
        (specs[each.start], each)
        for each in unit.decodings
        if each.start in specs
        and specs[each.start].name in may_stay
        and specs[each.start].shape == (each.rows, each.columns)
        and _stays(each)
    )
    views = []
    for place in unit.placements:
        spec = specs.get(place.start)
        fits = spec is not None and place.num_bytes == spec.num_elements * dtype.itemsize and place.dtype is dtype
        if spec is not None and fits and place.at % dtype.itemsize == 0:
            views.append(replace(spec, offset=place.at // dtype.itemsize))
    known = {spec.name for spec, _ in operands} | {spec.name for spec in views}
    rest = [spec for spec in unit.layout.parameters if spec.name not in known]
    if not operands or sum(spec.num_elements for spec in rest) > _MOST_MADE:
        return None
    made = lay_out(unit.layout.name, [(spec.name, spec.shape, (1.0, 0.0)) for spec in rest])
    shifts = [
        (old.offset, old.offset + old.num_elements, new.offset - old.offset)
        for new in made.parameters
        for old in rest
        if old.name == new.name
    ]
    placed = [(each, shift) for each in unit.placements for start, stop, shift in shifts if start <= each.start < stop]
    decoded = [(each, shift) for each in unit.decodings for start, stop, shift in shifts if start <= each.start < stop]
    return UnitInCodes(
        StoredUnit(replace(unit.layout, num_elements=unit.num_bytes // dtype.itemsize), unit.num_bytes, unit.extents),
        tuple(views),
        StoredUnit(
            made,
            unit.num_bytes,
            placements=tuple(replace(each, start=each.start + shift) for each, shift in placed),
            decodings=tuple(replace(each, start=each.start + shift) for each, shift in decoded),
        ),
        operands,
    )


def _stays(decoding: Decoding) -> bool:
    codec = decoding.codec
    return isinstance(codec, HasLines) and codec.multiplies(decoding.rows, decoding.columns)
