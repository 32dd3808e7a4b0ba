"""Where a unit may be cut under a rule's grain, and the pieces that a rule is given: whole items, nothing left out."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.terms.cuts import (
    chunk_borders,
    cuts_of,
    item_shape,
    largest_item_elements,
    least_chunk_elements,
    pieces_of,
)
from headrace.terms.layout import (
    UNIT_ALIGNMENT,
    ItemRange,
    ParameterSpec,
    UnitLayout,
    chunk_ranges,
    lay_out,
    planes_with,
)
from headrace.terms.rule_figures import Grain, RuleFigures

RULE = RuleFigures(
    name="R",
    planes=planes_with("bfloat16", ()),
    elementwise="embed",
    flops_per_element=1,
    temporary_bytes=4,
    grain=Grain.MATRIX,
)
shapes = st.one_of(
    st.tuples(st.integers(1, 3000)),
    st.tuples(st.integers(1, 300), st.integers(1, 130)),
    st.tuples(st.integers(1, 5), st.integers(1, 60), st.integers(1, 60)),
)
parameters = st.lists(st.tuples(shapes, st.booleans(), st.booleans()), min_size=1, max_size=6)


def made(drawn: list[tuple[tuple[int, ...], bool, bool]], rule: RuleFigures) -> UnitLayout:
    names = [
        (f"{'embed' if embed else 'w'}.{number}", shape, (1.0, 0.1 if decayed else 0.0))
        for number, (shape, embed, decayed) in enumerate(drawn)
    ]
    return lay_out("block.1", names, rule.parameter_alignment)


def items_of(parameter: ParameterSpec, rule: RuleFigures) -> list[tuple[int, int]]:
    shape = item_shape(parameter, rule)
    if shape is None:
        return []
    size, end = shape[0] * shape[1], parameter.offset + parameter.num_elements
    return [(start, start + size) for start in range(parameter.offset, end, size)]


@given(parameters, st.sampled_from([Grain.ROWS, Grain.MATRIX]), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_chunks_and_pieces_hold_whole_items(drawn: list[tuple[tuple[int, ...], bool, bool]], grain: Grain, size: int) -> None:
    rule = replace(RULE, grain=grain)
    layout = made(drawn, rule)
    cuts = cuts_of(layout, rule)
    asked = max(size * UNIT_ALIGNMENT, least_chunk_elements(cuts))
    borders = chunk_borders(layout.num_elements, asked, cuts)
    assert (borders[0], borders[-1]) == (0, layout.num_elements)
    assert all(0 < stop - start <= asked and start % UNIT_ALIGNMENT == 0 for start, stop in pairwise(borders))
    # A store that is there is asked for the longest of its chunks: it must mean the same.
    longest = max(stop - start for start, stop in pairwise(borders))
    assert chunk_borders(layout.num_elements, max(longest, least_chunk_elements(cuts)), cuts) == borders
    pieces = pieces_of(layout, rule)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == layout.num_elements
    for parameter in layout.parameters:
        items, group = items_of(parameter, rule), layout.groups[parameter.group]
        assert not any(start < border < stop for border in borders for start, stop in items)
        piece = next(piece for piece in pieces if piece.start <= parameter.offset < piece.stop)
        assert (piece.weight_decay, piece.learning_rate_scale) == (group.weight_decay, group.learning_rate_scale)
        assert isinstance(piece, ItemRange) == bool(items)
        if isinstance(piece, ItemRange):
            assert (piece.start, piece.stop) == (items[0][0], items[-1][1])
            assert piece.item_elements == items[0][1] - items[0][0] <= largest_item_elements(cuts)


def test_rows_of_a_matrix_and_matrices_of_a_stack() -> None:
    stack = ParameterSpec("experts", (4, 256, 64), 0, 65536, 0)
    assert item_shape(stack, RULE) == (256, 64)
    assert item_shape(stack, replace(RULE, grain=Grain.ROWS)) == (1, 64)
    for alone in (replace(stack, shape=(65536,)), replace(stack, name="embed_tokens")):
        assert item_shape(alone, RULE) is None
    assert item_shape(stack, replace(RULE, grain=Grain.ELEMENT)) is None


def test_a_rule_of_elements_cuts_anywhere_and_is_given_the_groups() -> None:
    rule = replace(RULE, grain=Grain.ELEMENT)
    layout = made([((100, 70), False, True), ((33,), False, False)], rule)
    assert cuts_of(layout, rule) == ()
    assert pieces_of(layout, rule) == layout.groups
    assert rule.parameter_alignment == 32
    borders = chunk_borders(layout.num_elements, UNIT_ALIGNMENT, ())
    assert list(pairwise(borders)) == chunk_ranges(layout.num_elements, UNIT_ALIGNMENT)


@pytest.mark.parametrize(("columns", "rows"), [(4096, 1), (768, 8), (5120, 2), (3, 2048)])
def test_rows_are_cut_where_a_row_and_a_page_begin(columns: int, rows: int) -> None:
    rule = replace(RULE, grain=Grain.ROWS)
    layout = made([((rows * 7, columns), False, True)], rule)
    assert [cut.grain for cut in cuts_of(layout, rule)] == [rows * columns]
    borders = chunk_borders(layout.num_elements, 2 * rows * columns, cuts_of(layout, rule))
    assert [stop - start for start, stop in pairwise(borders)] == [2 * rows * columns] * 3 + [rows * columns]
