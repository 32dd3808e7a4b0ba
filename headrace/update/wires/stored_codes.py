"""Blocks whose weights the model's files already hold coded: they lie on the drives in the same parts, and are never encoded.

Invariant: a block's slot is decoded from the bytes of the model's files.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from headrace.codec import Codec, Parts
from headrace.codec.units import plain_part
from headrace.model import Chain, WeightMap
from headrace.model.directory.matching import Piece
from headrace.model.stored.coded_source import CodedSource
from headrace.terms.coding import CodedUnit, CodePart, as_matrix, lay_out_parts
from headrace.terms.layout import ParameterSpec, PlaneSet


@dataclass(frozen=True)
class StoredCodes:
    """Where the parts of coded blocks lie, by unit; their codecs, by name; and their readers, by unit and matrix offset."""

    units: Mapping[int, CodedUnit] = field(default_factory=dict)
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    readers: Mapping[tuple[int, int], Callable[[], Parts]] = field(default_factory=dict)


def stored_codes(chain: Chain, weights: WeightMap, planes: PlaneSet) -> StoredCodes:
    """Return how the model's files code its blocks; parameters that are made from others lie as compute reads them."""
    units: dict[int, CodedUnit] = {}
    codecs: dict[str, Codec] = {}
    readers: dict[tuple[int, int], Callable[[], Parts]] = {}
    for unit, layout in enumerate(chain.layouts[1 : chain.num_blocks + 1], start=1):
        matrices: list[tuple[int, int, int, str | None, Iterable[CodePart]]] = []
        found = False
        for spec in layout.parameters:
            sources = _sources(weights, spec)
            if sources is None:
                rows, columns = as_matrix(spec.shape)
                matrices.append((spec.offset, rows, columns, None, (plain_part(planes, rows, columns),)))
                continue
            found = True
            for piece, source in sources:
                rows, columns = as_matrix(source.shape)
                offset = spec.offset + _first_row(spec, piece) * columns
                matrices.append((offset, rows, columns, source.codec.name, source.codec.places(rows, columns)))
                codecs[source.codec.name] = source.codec
                readers[unit, offset] = source.parts
        if found:
            units[unit] = lay_out_parts(sorted(matrices, key=lambda each: each[0]))
    return StoredCodes(units, codecs, readers)


def _sources(weights: WeightMap, spec: ParameterSpec) -> list[tuple[Piece, CodedSource]] | None:
    """Return the pieces of a parameter and their sources, if all are coded and lie one after another in it; else None."""
    found = []
    for piece in weights.pieces.get(spec.name, ()):
        source = weights.checkpoint.tensors[piece.key].coded
        if not isinstance(source, CodedSource):
            return None
        found.append((piece, source))
    return found or None


def _first_row(spec: ParameterSpec, piece: Piece) -> int:
    """Return the row of the parameter, seen as one matrix, with which a piece begins: experts' rows follow one another."""
    if not piece.index:
        return 0
    expert, rows = piece.index[0], piece.index[-1]
    assert isinstance(expert, int), "a piece of a stack is of one expert"
    return expert * spec.shape[-2] + (rows.start or 0 if isinstance(rows, slice) else 0)
