"""Weights in a model's own files: which bytes of which shard make up a unit, and how.

If a file has a unit's tensors as compute reads them, the bytes read are the weights. Parameters are views of them, and nothing
is copied between drive and product. Otherwise the bytes are put in their places after reading. That is so for another dtype,
and for single experts that are computed as one stack. Coded weights are read as they are coded, and decoded there. Where
transformers changes stored tensors by more than placing them, the unit is read and made whole, each time.

Invariant: a unit's layout names each of its parameters once, at an offset that is allowed for numbers of that size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headrace.files.block_file import BLOCK_BYTES
from headrace.files.extents import Extent
from headrace.model.directory.matching import Piece, WeightMap
from headrace.model.stored.coded_source import CodedSource
from headrace.model.stored.decoding import Decoding
from headrace.model.stored.safetensors_file import StoredTensor
from headrace.terms.coding import Decodes, decodes_of
from headrace.terms.layout import ParameterSpec, UnitLayout
from headrace.terms.sizes import round_up

# Tensors of one file that lie nearer to one another are read together, with the bytes between them; but these may be at most an
# eighth of the bytes before. Files order tensors by dtype: other blocks lie between a small block's scales and codes.
_GAP_BYTES, _GAP_SHARE = 64 << 10, 1 / 8
# Where tensors in a slot begin. With operands between such borders MKL's float32 products round differently, and libraries of
# GPUs have slower kernels. Files align tensors to 8 bytes only.
TENSOR_ALIGNMENT_BYTES = 64
_STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class SlotPiece:
    """Bytes `[at, at + num_bytes)` of what was read, numbers of `dtype`, are elements from `start` on of a unit's slot."""

    at: int
    num_bytes: int
    dtype: torch.dtype
    start: int

    @property
    def lies_odd(self) -> bool:
        """Whether it begins at no multiple of its numbers' size: it is copied before it is read."""
        return self.at % self.dtype.itemsize != 0


@dataclass(frozen=True, slots=True)
class StoredUnit:
    """How a unit comes from the files. Without `extents` it is made whole by `import_unit`, into a slot of this layout.

    `num_bytes` are the bytes that are read; without `placements` and `decodings` they are the slot.
    """

    layout: UnitLayout
    num_bytes: int
    extents: tuple[Extent, ...] = ()
    placements: tuple[SlotPiece, ...] = ()
    decodings: tuple[Decoding, ...] = ()

    @property
    def is_made(self) -> bool:
        """Whether the slot is made of what is read, by `put`."""
        return bool(self.placements or self.decodings)

    @property
    def decodes(self) -> Decodes:
        """The weights that `put` decodes, by kind of code."""
        return decodes_of((each.codec.name, each.rows * each.columns) for each in self.decodings)

    def put(self, read: torch.Tensor, into: torch.Tensor) -> None:
        """Fill the flat slot `into` from the bytes `read` (uint8), on one device."""
        for place in self.placements:
            part = read[place.at : place.at + place.num_bytes]
            values = (part.clone() if place.lies_odd else part).view(place.dtype)
            into[place.start : place.start + values.numel()].copy_(values)
        for decoding in self.decodings:
            decoding.put(read, into)

    def making_bytes(self, dtype: torch.dtype, *, on_host: bool = True) -> int:
        """Return the most bytes that `put` allocates at once, for a slot of `dtype` on the host or on another device."""
        copied = max((place.num_bytes for place in self.placements if place.lies_odd), default=0)
        return max([copied, *(decoding.making_bytes(dtype, on_host=on_host) for decoding in self.decodings)])


def stored_units(
    layouts: Sequence[UnitLayout], weights: WeightMap, dtype: torch.dtype, *, on_cpu: bool
) -> tuple[StoredUnit, ...]:
    """Return how each unit comes from the files of `weights`, for compute in `dtype`.

    `on_cpu`: the CPU computes; its products of 16-bit numbers give the same bits wherever operands lie.
    """
    converted = {name for conversion in weights.conversions for name in conversion.parameters}
    alignment_bytes = alignment_of(dtype, on_cpu=on_cpu)
    return tuple(_stored_unit(layout, weights, dtype, converted, alignment_bytes) for layout in layouts)


def alignment_of(dtype: torch.dtype, *, on_cpu: bool) -> int:
    """Return the number of bytes to which the tensors of a slot are aligned."""
    return dtype.itemsize if on_cpu and dtype.itemsize == 2 else TENSOR_ALIGNMENT_BYTES


def paths_of(units: Sequence[StoredUnit]) -> tuple[Path, ...]:
    """Return the files that extents of `units` lie in."""
    return tuple(dict.fromkeys(extent.path for unit in units for extent in unit.extents))


def _stored_unit(
    layout: UnitLayout, weights: WeightMap, dtype: torch.dtype, converted: set[str], alignment_bytes: int
) -> StoredUnit:
    if any(spec.name in converted for spec in layout.parameters):
        return StoredUnit(layout, layout.num_elements * dtype.itemsize)
    pieces = {spec.name: weights.pieces[spec.name] for spec in layout.parameters}
    return stored_unit(layout, pieces, weights.checkpoint.tensors, dtype, alignment_bytes)


def stored_unit(
    layout: UnitLayout,
    pieces: Mapping[str, Sequence[Piece]],
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    alignment_bytes: int,
) -> StoredUnit:
    """Return how the parameters of `layout` come from `pieces` of `tensors`, for compute in `dtype`."""
    found = [part for each in pieces.values() for piece in each for part in _parts(tensors[piece.key])]
    extents, places = _extents(found)
    num_bytes = sum(extent.num_bytes for extent in extents)
    as_read = _as_read(layout, pieces, tensors, places, dtype, num_bytes, alignment_bytes)
    if as_read is not None:
        return StoredUnit(as_read, num_bytes, extents)
    placements, decodings = [], []
    for spec in layout.parameters:
        for piece in pieces[spec.name]:
            tensor, start = tensors[piece.key], _start(spec, piece)
            if isinstance(tensor.coded, CodedSource):
                decodings.append(Decoding.of(tensor.coded, places, start))
            else:
                placements.append(SlotPiece(places[piece.key], tensor.num_bytes, _STORED_DTYPES[tensor.dtype], start))
    return StoredUnit(layout, num_bytes, extents, tuple(placements), tuple(decodings))


def _parts(tensor: StoredTensor) -> Sequence[StoredTensor]:
    """Return the stored tensors of which a weight is made."""
    return tuple(tensor.coded.stored.values()) if isinstance(tensor.coded, CodedSource) else (tensor,)


def _extents(tensors: Sequence[StoredTensor]) -> tuple[tuple[Extent, ...], dict[str, int]]:
    """Return extents that hold `tensors`, in the order of the files, and where each tensor begins in what is read."""
    extents: list[Extent] = []
    places: dict[str, int] = {}
    for tensor in sorted(tensors, key=lambda each: (str(each.path), each.offset)):
        start = tensor.offset // BLOCK_BYTES * BLOCK_BYTES
        stop = round_up(tensor.offset + tensor.num_bytes, BLOCK_BYTES)
        last = extents[-1] if extents else None
        gap = start - (last.offset + last.num_bytes) if last is not None and last.path == tensor.path else _GAP_BYTES
        if last is not None and gap < min(_GAP_BYTES, 1 + _GAP_SHARE * last.num_bytes):
            extents[-1] = last = replace(last, num_bytes=max(last.num_bytes, stop - last.offset))
        else:
            at = last.at + last.num_bytes if last is not None else 0
            extents.append(last := Extent(tensor.path, start, stop - start, at))
        places[tensor.key] = last.at + tensor.offset - last.offset
    return tuple(extents), places


def _as_read(
    layout: UnitLayout,
    pieces: Mapping[str, Sequence[Piece]],
    tensors: Mapping[str, StoredTensor],
    places: dict[str, int],
    dtype: torch.dtype,
    num_bytes: int,
    alignment_bytes: int,
) -> UnitLayout | None:
    """Return the layout with which the bytes read are the slot; None if a tensor has another dtype, is coded, cut or askew."""
    specs = []
    for spec in layout.parameters:
        piece = pieces[spec.name][0]
        whole = len(pieces[spec.name]) == 1 and piece.index == () and tensors[piece.key].coded is None
        if not whole or _STORED_DTYPES[tensors[piece.key].dtype] is not dtype or places[piece.key] % alignment_bytes:
            return None
        specs.append(replace(spec, offset=places[piece.key] // dtype.itemsize))
    return replace(layout, parameters=tuple(specs), groups=(), num_elements=num_bytes // dtype.itemsize)


def _start(spec: ParameterSpec, piece: Piece) -> int:
    """Return the first element of the slot that a piece fills: pieces are whole rows of a parameter, one after another."""
    part = torch.empty(spec.shape, device="meta", dtype=torch.float32)[piece.index]
    assert part.is_contiguous(), f"{piece.key} is no run of {spec.name}"
    return spec.offset + int(part.storage_offset())
