"""Single experts in a model's own files, and the rest of their blocks, which every token reads.

If a file has an expert's tensors one by one, or one stack of all experts, an expert is one run of bytes, or a few. Coded
experts are read as they are coded, and decoded one at a time.

Invariant: an expert has the bits that it has in its whole block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from headrace.codec.bf16x12 import Bf16x12
from headrace.model.directory.in_place import StoredUnit, alignment_of, stored_unit
from headrace.model.directory.matching import Piece, WeightMap
from headrace.model.parts.banks import BlockExperts, ExpertPlaces
from headrace.model.stored.coded_source import CodedSource, read_tensor
from headrace.model.stored.safetensors_file import StoredTensor
from headrace.terms.coding import as_matrix
from headrace.terms.errors import ModelError
from headrace.terms.layout import UnitLayout, lay_out


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """How a model whose experts are loaded one at a time comes from the files. `commons` are the units without experts;
    `experts` are those of each unit, () for a unit without any.
    """

    commons: tuple[StoredUnit, ...]
    experts: tuple[tuple[StoredUnit, ...], ...]

    def places(self, blocks: Sequence[BlockExperts | None], units: Sequence[UnitLayout] = ()) -> ExpertPlaces:
        """Return where weights of these experts lie in slots of their own, and in whole `units`."""
        return ExpertPlaces(blocks, [[each.layout for each in own] for own in self.experts], units)


class NotStoredSingly(Exception):
    """Why experts cannot be read one at a time; "" where there are none."""


def stored_experts(
    units: Sequence[StoredUnit],
    blocks: Sequence[BlockExperts | None],
    weights: WeightMap,
    dtype: torch.dtype,
    *,
    on_cpu: bool,
) -> StoredExperts:
    """Return how experts of `blocks`, and the rest of `units`, come from the files of `weights`, for compute in `dtype`.

    Raises:
        NotStoredSingly: an expert is made of more than its own bytes; the message says of which parameter.
    """
    converted = {name for conversion in weights.conversions for name in conversion.parameters}
    alignment_bytes = alignment_of(dtype, on_cpu=on_cpu)
    tensors = weights.checkpoint.tensors
    commons = list(units)
    experts: list[tuple[StoredUnit, ...]] = [()] * len(units)
    for unit, block in enumerate(blocks, start=1):
        if block is None:
            continue
        names = frozenset(block.names.values())
        if made := sorted(names & converted):
            raise NotStoredSingly(f"{made[0]} is made of stored tensors by more than placing")
        common = without(units[unit].layout, names)
        if any(spec.name in converted for spec in common.parameters):
            commons[unit] = StoredUnit(common, common.num_elements * dtype.itemsize)
        else:
            pieces = {spec.name: weights.pieces[spec.name] for spec in common.parameters}
            commons[unit] = stored_unit(common, pieces, tensors, dtype, alignment_bytes)
        places = {name: _by_expert(weights.pieces[name], block.num_experts) for name in names}
        found: list[StoredUnit] = []
        for expert in range(block.num_experts):
            layout = expert_layout(units[unit].layout, names, expert)
            own, parts = _of_expert(layout, places, tensors, expert)
            found.append(stored_unit(layout, own, parts, dtype, alignment_bytes))
        experts[unit] = tuple(found)
    return StoredExperts(tuple(commons), tuple(experts))


def experts_as_computed(
    layouts: Sequence[UnitLayout], blocks: Sequence[BlockExperts | None], dtype: torch.dtype
) -> StoredExperts:
    """Return experts that lie nowhere yet, and the rest of units of these layouts: each with the bytes of its slot."""
    commons, experts = list[StoredUnit](), list[tuple[StoredUnit, ...]]()
    for layout, block in zip(layouts, (None, *blocks, None), strict=False):
        names = frozenset(block.names.values()) if block else frozenset[str]()
        common, own = without(layout, names) if block else layout, expert_layout(layout, names, 0)
        commons.append(StoredUnit(common, common.num_elements * dtype.itemsize))
        each = StoredUnit(own, own.num_elements * dtype.itemsize)
        experts.append((each,) * block.num_experts if block else ())
    return StoredExperts(tuple(commons), tuple(experts))


def without(layout: UnitLayout, names: frozenset[str]) -> UnitLayout:
    """Return the layout of a unit's parameters without those of these names."""
    kept = [(spec.name, spec.shape, (1.0, 0.0)) for spec in layout.parameters if spec.name not in names]
    return lay_out(layout.name, kept)


def expert_layout(layout: UnitLayout, names: frozenset[str], expert: int) -> UnitLayout:
    """Return the layout of one expert of a unit; the parameters of these names are stacks of experts."""
    own = [(spec.name, spec.shape[1:], (1.0, 0.0)) for spec in layout.parameters if spec.name in names]
    return lay_out(f"{layout.name} expert {expert}", own)


def _by_expert(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """Return the pieces of each expert; a piece that is a whole stack belongs to all."""
    found: list[list[Piece]] = [[] for _ in range(count)]
    for piece in pieces:
        for each in found if piece.index == () else [found[int(piece.index[0])]]:  # type: ignore[arg-type]
            each.append(piece)
    return found


def _of_expert(
    layout: UnitLayout, places: Mapping[str, list[list[Piece]]], tensors: Mapping[str, StoredTensor], expert: int
) -> tuple[dict[str, Sequence[Piece]], dict[str, StoredTensor]]:
    """Return the pieces of one expert, and the tensors that they are: its part of a stack."""
    pieces: dict[str, Sequence[Piece]] = {}
    parts: dict[str, StoredTensor] = {}
    for spec in layout.parameters:
        found: list[Piece] = []
        for piece in places[spec.name][expert]:
            stored = tensors[piece.key]
            if piece.index == ():
                stored = _part(stored, expert, len(places[spec.name]))
                found.append(replace(piece, key=stored.key))
            else:
                found.append(replace(piece, index=_within(piece, stored, spec.shape)))
            parts[stored.key] = stored
        pieces[spec.name] = found
    return pieces, parts


def _within(piece: Piece, stored: StoredTensor, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    """Return the index of a piece within its expert; () where it is all of it."""
    return () if stored.shape == shape else piece.index[1:]


def _part(stored: StoredTensor, expert: int, count: int) -> StoredTensor:
    """Return one expert's part of a stack."""
    coded = stored.coded
    key = f"{stored.key}[{expert}]"
    if coded is None:
        return _slice(stored, expert, keep=False, key=key)
    assert isinstance(coded, CodedSource), "what decodes"
    own = _coded_part(stored, coded, expert, count)
    return replace(stored, key=key, shape=own.shape, num_bytes=stored.num_bytes // count, coded=own)


def _coded_part(stored: StoredTensor, coded: CodedSource, expert: int, count: int) -> CodedSource:
    if isinstance(coded.codec, Bf16x12):
        return _of_rows(coded, coded.codec, expert, as_matrix(coded.shape)[0] // count)
    whole = all(part.shape[:1] == (count,) and len(part.shape) > 2 for part in coded.stored.values())
    if not whole or coded.given:
        raise NotStoredSingly(f"{stored.key} is coded as a whole, in {coded.codec.name}")
    parts: Mapping[str, StoredTensor] = {
        name: _slice(part, expert, keep=True, key=f"{part.key}[{expert}]") for name, part in coded.stored.items()
    }
    return replace(coded, shape=coded.shape[1:], stored=parts)


def _of_rows(coded: CodedSource, codec: Bf16x12, expert: int, rows: int) -> CodedSource:
    """Return the `rows` of one expert of a stack that is coded row by row; two numbers read say where its escapes lie."""
    offsets = coded.stored["escape_offsets"]
    start, stop = expert * rows, (expert + 1) * rows
    first, last = (int(read_tensor(_rows(offsets, row, row + 1, expert))) for row in (start, stop))
    if not 0 <= first <= last < coded.stored["escapes"].shape[0]:
        raise ModelError(f"{offsets.path}: {offsets.key} is damaged: rows {start} to {stop} have no escapes of their own")
    ranges = {"escape_offsets": (start, stop + 1), "escapes": (first, last + 1)}
    parts = {name: _rows(part, *ranges.get(name, (start, stop)), expert) for name, part in coded.stored.items()}
    return replace(coded, codec=replace(codec, escapes=last - first), shape=coded.shape[1:], stored=parts)


def _rows(stored: StoredTensor, start: int, stop: int, expert: int) -> StoredTensor:
    """Return entries `start` to `stop` of a part, as a part of an expert's own."""
    size = stored.num_bytes // stored.shape[0]
    shape, key = (stop - start, *stored.shape[1:]), f"{stored.key}[{expert}]"
    return replace(stored, key=key, offset=stored.offset + start * size, num_bytes=(stop - start) * size, shape=shape)


def _slice(stored: StoredTensor, expert: int, *, keep: bool, key: str) -> StoredTensor:
    """Return the bytes of one entry of a stack; with `keep` it keeps its first dimension, of size one."""
    size = stored.num_bytes // stored.shape[0]
    shape = (1, *stored.shape[1:]) if keep else stored.shape[1:]
    return replace(stored, key=key, offset=stored.offset + expert * size, num_bytes=size, shape=shape)
