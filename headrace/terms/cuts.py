"""Where a unit may be cut into chunks, and which pieces of a chunk a rule is given. Both follow from the rule's grain.

A rule that updates each element alone lets a unit be cut anywhere. A rule that needs whole rows, or whole matrices, is given
*items*: the rows or matrices of the layout. In a stack (experts) each matrix is one item. Chunks hold whole items. A chunk
begins on a page of the drives, so a cut is where an item and a page begin at once.

Invariant: no cut divides an item, and no piece has only a part of one.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, starmap
from math import isqrt, lcm
from typing import NamedTuple

from headrace.terms.layout import (
    UNIT_ALIGNMENT,
    GroupRange,
    ItemRange,
    Padding,
    ParameterSpec,
    Plane,
    UnitLayout,
    chunk_ranges,
)
from headrace.terms.rule_figures import Grain, RuleFigures
from headrace.terms.sizes import PAGE_BYTES, round_up

# The host updates so many elements of rows or matrices at once on each thread; more only where a single item has more. With so
# few, torch stays on the calling thread and leaves the others to compute.
HOST_ITEM_ELEMENTS = 32768


class Cuts(NamedTuple):
    """Elements `[start, stop)` of a unit, which may be cut at `start` and every `grain` elements from there.

    They are items of `item_elements` elements each; the size is 1 where each element is updated alone. Under a rule with planes
    that have numbers for some elements only, `items` is the number of items. `sides` says how many sides each has
    (`num_sides`). Both are 0 if each element is updated alone.
    """

    start: int
    stop: int
    grain: int
    item_elements: int
    items: int = 0
    sides: int = 0


def item_shape(parameter: ParameterSpec, rule: RuleFigures, unit: str = "block") -> tuple[int, int] | None:
    """Return rows and columns of the items of a parameter of `unit` under `rule`, None if its elements are updated alone.

    Those are parameters with fewer than two dimensions, and matrices of one row or column, unless `rule.takes_vectors`. Those
    that `rule.elementwise` matches are, too. Under a rule of `only_matrices` so is everything that is no matrix. Of more than
    two dimensions the last two are a matrix.
    """
    if rule.grain is Grain.ELEMENT:
        return None
    if len(parameter.shape) < 2:
        return (1, parameter.num_elements) if rule.takes_vectors else None
    if rule.elementwise and re.search(rule.elementwise, f"{unit}/{parameter.name}"):
        return None
    if rule.only_matrices and not parameter.is_matrix:
        return None
    rows, columns = parameter.shape[-2:]
    if rule.grain is Grain.MATRIX and min(rows, columns) == 1 and not rule.takes_vectors:
        return None
    return (1 if rule.grain is Grain.ROWS else rows), columns


def cuts_of(layout: UnitLayout, rule: RuleFigures) -> tuple[Cuts, ...]:
    """Return where a unit may be cut; for a rule whose grain is the element (), which means anywhere."""
    if rule.grain is Grain.ELEMENT:
        return ()
    found: list[Cuts] = []
    uneven = is_uneven(rule.planes.states)
    for parameter, stop in _with_ends(layout):
        shape = item_shape(parameter, rule, layout.name)
        item = shape[0] * shape[1] if shape else 1
        items, sides = (parameter.num_elements // item, num_sides(*shape)) if uneven and shape else (0, 0)
        grain = min(lcm(item, UNIT_ALIGNMENT), stop - parameter.offset)
        last = found[-1] if found else None
        # Where items are counted, a range that ends in padding is not joined with that of the next parameter.
        whole = last is not None and (not last.items or last.items * item == last.stop - last.start)
        alike = last is not None and (last.grain, last.item_elements, last.sides) == (grain, item, sides)
        if last and whole and alike and not (last.stop - last.start) % grain:
            found[-1] = last._replace(stop=stop, items=last.items + items)
        else:
            found.append(Cuts(parameter.offset, stop, grain, item, items, sides))
    return tuple(found)


def num_sides(rows: int, columns: int) -> int:
    """Return how many numbers a plane of sides has for one item of so many rows and columns."""
    return columns if rows == 1 else rows + columns


def is_uneven(planes: Sequence[Plane]) -> bool:
    """Return whether any of the planes has numbers for some elements only."""
    return any(plane.of != "element" for plane in planes)


def num_values(plane: Plane, start: int, stop: int, cuts: Sequence[Cuts]) -> int:
    """Return how many numbers a plane has for elements `[start, stop)` of a unit, which begin and end where it may be cut."""
    if plane.of == "element":
        return plane.num_values(stop - start)
    total = 0
    for each in cuts:
        first, last = max(start, each.start), min(stop, each.stop)
        if first < last and not each.items:
            total += last - first
        elif first < last and plane.of == "sides":
            begin, end = (min((place - each.start) // each.item_elements, each.items) for place in (first, last))
            total += (end - begin) * each.sides
    return total


def piece_values(plane: Plane, piece: GroupRange) -> int:
    """Return how many numbers a plane has for a piece of a unit (`pieces_of`)."""
    if plane.of == "element":
        return plane.num_values(piece.stop - piece.start)
    if isinstance(piece, Padding):
        return 0
    if not isinstance(piece, ItemRange):
        return piece.stop - piece.start
    items = (piece.stop - piece.start) // piece.item_elements
    return items * num_sides(piece.rows, piece.columns) if plane.of == "sides" else 0


def product_flops(rule: RuleFigures, start: int, stop: int, cuts: Sequence[Cuts]) -> float:
    """Return the operations of the products of matrices in the update of `[start, stop)`, which begins and ends at cuts.

    Rows and columns of a matrix are told from its size and its sides, which are counted under a rule with uneven planes.
    """
    total = 0.0
    for each in cuts if rule.gram_products else ():
        first, last = max(start, each.start), min(stop, each.stop)
        if first < last and each.items:
            begin, end = (min((place - each.start) // each.item_elements, each.items) for place in (first, last))
            short = (each.sides - isqrt(each.sides**2 - 4 * each.item_elements)) // 2
            total += (end - begin) * rule.item_flops(short, each.sides - short)
    return total


def plane_parts_of(planes: Sequence[Plane], pieces: Sequence[GroupRange], start: int) -> list[tuple[slice, ...]]:
    """Return for each of `pieces`, in order, where its numbers lie in each plane; the planes begin with element `start`."""
    if not is_uneven(planes):
        return [tuple(plane.part(piece.start - start, piece.stop - start) for plane in planes) for piece in pieces]
    ends, found = [0] * len(planes), []
    for piece in pieces:
        begins = ends
        ends = [begin + piece_values(plane, piece) for begin, plane in zip(begins, planes, strict=True)]
        found.append(tuple(map(slice, begins, ends)))
    return found


def plane_lengths_of(planes: Sequence[Plane], pieces: Sequence[GroupRange], start: int) -> list[int]:
    """Return how many numbers each plane has for pieces that cover a range from element `start` on."""
    return [part.stop for part in plane_parts_of(planes, pieces, start)[-1]] if pieces else [0] * len(planes)


def state_bytes(planes: Sequence[Plane], start: int, stop: int, cuts: Sequence[Cuts]) -> int:
    """Return the bytes of the planes of a chunk `[start, stop)` of a unit, back to back, in whole pages."""
    size = sum(num_values(plane, start, stop, cuts) * plane.bytes_per_element for plane in planes)
    return round_up(size, PAGE_BYTES)


def state_places(planes: Sequence[Plane], start: int, stop: int, cuts: Sequence[Cuts]) -> list[slice]:
    """Return where the bytes of each plane lie in a chunk `[start, stop)` of a unit."""
    sizes = (num_values(plane, start, stop, cuts) * plane.bytes_per_element for plane in planes)
    return list(starmap(slice, pairwise(accumulate(sizes, initial=0))))


def pieces_of(layout: UnitLayout, rule: RuleFigures) -> tuple[GroupRange, ...]:
    """Return the ranges of a unit that share decay and learning rate; each parameter with items is a range of its own.

    Padding after items is a `Padding` under a rule whose planes have no numbers for it.
    """
    if rule.grain is Grain.ELEMENT:
        return layout.groups
    found: list[GroupRange] = []
    uneven = is_uneven(rule.planes.states)

    def alone(start: int, stop: int, group: GroupRange) -> None:
        scalars = group.learning_rate_scale, group.weight_decay
        last = found[-1] if found else None
        if last and type(last) is GroupRange and (last.learning_rate_scale, last.weight_decay) == scalars:
            found[-1] = GroupRange(last.start, stop, *scalars)
        elif start < stop:
            found.append(GroupRange(start, stop, *scalars))

    for parameter, stop in _with_ends(layout):
        group, shape, end = layout.groups[parameter.group], item_shape(parameter, rule, layout.name), parameter.offset
        if shape:
            end += parameter.num_elements
            found.append(ItemRange(parameter.offset, end, group.learning_rate_scale, group.weight_decay, *shape))
        if shape and uneven and end < stop:
            found.append(Padding(end, stop, group.learning_rate_scale, group.weight_decay))
        else:
            alone(end, stop, group)
    return tuple(found)


def _with_ends(layout: UnitLayout) -> list[tuple[ParameterSpec, int]]:
    """Return each parameter and where its padding ends."""
    starts = [parameter.offset for parameter in layout.parameters[1:]]
    return list(zip(layout.parameters, (*starts, layout.num_elements), strict=True))


def least_chunk_elements(cuts: Sequence[Cuts]) -> int:
    """Return the elements of the smallest chunk that every item fits in."""
    return max((each.grain for each in cuts), default=UNIT_ALIGNMENT)


def largest_item_elements(cuts: Sequence[Cuts]) -> int:
    """Return the elements of the largest item."""
    return max((each.item_elements for each in cuts), default=1)


@lru_cache(maxsize=1024)
def chunk_borders(num_elements: int, chunk_elements: int, cuts: tuple[Cuts, ...]) -> tuple[int, ...]:
    """Return where the chunks of a unit begin, and where the last one ends.

    Each chunk is as long as its items allow, up to `chunk_elements`; an item that is longer has a chunk of its own. If no chunk
    is longer than `chunk_elements`, asking for the length of the longest chunk gives the same borders. So a plan can be made
    again for the chunks of an existing store.
    """
    if not cuts:
        return (*(start for start, _ in chunk_ranges(num_elements, chunk_elements)), num_elements)
    borders = [0]
    for start, stop, grain, *_ in cuts:
        while stop - borders[-1] > chunk_elements:
            begin = borders[-1]
            last = start + (begin + chunk_elements - start) // grain * grain
            after = begin + grain if begin >= start else start
            borders.append(min(max(last, after), stop))
    return tuple(borders) if borders[-1] == num_elements else (*borders, num_elements)
