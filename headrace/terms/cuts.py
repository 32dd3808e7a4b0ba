"""Where a unit may be cut into chunks, and what of a chunk a rule is given at a time: what a rule's grain asks of a layout.

A rule that updates each element alone lets a unit be cut anywhere. One that needs whole rows, or whole matrices, is given
*items*: rows or matrices as the layout has them, of a stack of matrices (experts) each by itself. Chunks hold whole items.
A chunk begins on a page of the drives, so a cut is where an item and a page begin at once.

Invariant: no cut and no piece has a part of an item.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from headrace.terms.layout import UNIT_ALIGNMENT, GroupRange, ItemRange, ParameterSpec, UnitLayout, chunk_ranges
from headrace.terms.rule_figures import Grain, RuleFigures

# Elements of rows or matrices that the host updates at once on each thread, unless one has more: so few that torch keeps to
# the thread; compute has the others.
HOST_ITEM_ELEMENTS = 32768


class Cuts(NamedTuple):
    """Elements `[start, stop)` of a unit, which may be cut at `start` and every `grain` elements from there.

    They are items of `item_elements` elements each: 1 where each element is updated alone.
    """

    start: int
    stop: int
    grain: int
    item_elements: int


def item_shape(parameter: ParameterSpec, rule: RuleFigures) -> tuple[int, int] | None:
    """Return rows and columns of the items of a parameter under `rule`, None if its elements are updated alone.

    Those are parameters with fewer than two dimensions, and those that `rule.elementwise` matches. Of more than two dimensions
    the last two are a matrix.
    """
    if rule.grain is Grain.ELEMENT or len(parameter.shape) < 2:
        return None
    if rule.elementwise and re.search(rule.elementwise, parameter.name):
        return None
    rows, columns = parameter.shape[-2:]
    return (1 if rule.grain is Grain.ROWS else rows), columns


def cuts_of(layout: UnitLayout, rule: RuleFigures) -> tuple[Cuts, ...]:
    """Return where a unit may be cut: for a rule whose grain is the element nothing, which means anywhere."""
    if rule.grain is Grain.ELEMENT:
        return ()
    found: list[Cuts] = []
    for parameter, stop in _with_ends(layout):
        shape = item_shape(parameter, rule)
        item = shape[0] * shape[1] if shape else 1
        grain = min(lcm(item, UNIT_ALIGNMENT), stop - parameter.offset)
        last = found[-1] if found else None
        if last and last[2:] == (grain, item) and not (last.stop - last.start) % grain:
            found[-1] = last._replace(stop=stop)
        else:
            found.append(Cuts(parameter.offset, stop, grain, item))
    return tuple(found)


def pieces_of(layout: UnitLayout, rule: RuleFigures) -> tuple[GroupRange, ...]:
    """Return the ranges of a unit that share decay and learning rate, those of items apart; padding is between them."""
    if rule.grain is Grain.ELEMENT:
        return layout.groups
    found: list[GroupRange] = []

    def alone(start: int, stop: int, group: GroupRange) -> None:
        scalars = group.learning_rate_scale, group.weight_decay
        last = found[-1] if found else None
        if last and type(last) is GroupRange and (last.learning_rate_scale, last.weight_decay) == scalars:
            found[-1] = GroupRange(last.start, stop, *scalars)
        elif start < stop:
            found.append(GroupRange(start, stop, *scalars))

    for parameter, stop in _with_ends(layout):
        group, shape, end = layout.groups[parameter.group], item_shape(parameter, rule), parameter.offset
        if shape:
            end += parameter.num_elements
            found.append(ItemRange(parameter.offset, end, group.learning_rate_scale, group.weight_decay, *shape))
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
    """Return where the chunks of a unit begin, and its end: each as long as items allow, of at most `chunk_elements`.

    What no cut divides has a chunk of its own. If no chunk is longer than `chunk_elements`, the length of the longest gives
    the same borders when it is asked for in its place: so a store's chunks can be planned for again.
    """
    if not cuts:
        return (*(start for start, _ in chunk_ranges(num_elements, chunk_elements)), num_elements)
    borders = [0]
    for start, stop, grain, _ in cuts:
        while stop - borders[-1] > chunk_elements:
            begin = borders[-1]
            last = start + (begin + chunk_elements - start) // grain * grain
            after = begin + grain if begin >= start else start
            borders.append(min(max(last, after), stop))
    return tuple(borders) if borders[-1] == num_elements else (*borders, num_elements)
