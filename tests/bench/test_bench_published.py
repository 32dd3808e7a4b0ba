"""Fuyou's policy on the virtual clock reproduces what its authors measured."""

import math

import pytest
from fuyou import (
    COMPUTE_FLOPS_PER_SECOND,
    GPT3_13B,
    GPT3_175B,
    POINTS,
    WRITE_BYTES_PER_SECOND,
    Row,
    Shape,
    compare,
    fuyou_ceilings,
    fuyou_program,
    group_modules,
    table,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan.clock.simulate import simulate
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Verb


@pytest.fixture(scope="module")
def rows() -> tuple[Row, ...]:
    return compare()


def test_the_13b_table_is_reproduced_within_a_tenth(rows: tuple[Row, ...]):
    ratios = {row.point.batch: row.ratio for row in rows if row.point.shape is GPT3_13B}
    assert sorted(ratios) == [8, 16, 32, 64, 128]
    assert all(abs(ratio - 1) <= 0.10 for ratio in ratios.values()), ratios
    assert math.sqrt(sum((ratio - 1) ** 2 for ratio in ratios.values()) / len(ratios)) < 0.05


def test_the_175b_points_follow_without_being_fitted(rows: tuple[Row, ...]):
    ratios = {row.point.batch: row.ratio for row in rows if not row.point.fitted}
    assert sorted(ratios) == [8, 16]
    assert all(abs(ratio - 1) <= 0.10 for ratio in ratios.values()), ratios


def test_published_figures_are_the_published_ones():
    assert GPT3_13B.num_parameters == pytest.approx(12.84e9, rel=1e-3)
    assert GPT3_175B.num_parameters == pytest.approx(174.6e9, rel=1e-3)
    assert [point.teraflops for point in POINTS[:5]] == [42.8, 84.3, 143.1, 155.8, 153.8]
    assert [point.tokens / point.seconds for point in POINTS[5:]] == [pytest.approx(50), pytest.approx(83)]


def test_the_testbed_is_a_valid_profile():
    ceilings = fuyou_ceilings()
    assert Ceilings.from_json(ceilings.to_json()) == ceilings


def test_a_step_moves_what_the_papers_say():
    elements = GPT3_13B.num_parameters
    program = fuyou_program(GPT3_13B, 8192)
    moved = {lane: sum(op.bytes for op in program.lane(lane)) for lane in Lane}
    assert moved[Lane.SSD_READ] == 16 * elements
    assert moved[Lane.SSD_WRITE] == 14 * elements
    assert moved[Lane.UPDATE] == 28 * elements
    assert sum(op.bytes for op in program.ops if op.verb is Verb.UPLOAD) == 4 * elements
    assert sum(op.bytes for op in program.ops if op.verb is Verb.DRAIN) == 2 * elements
    assert sum(op.flops for op in program.ops) == pytest.approx(6 * elements * 8192)


def test_no_update_spills_into_the_next_forward():
    timeline = simulate([fuyou_program(GPT3_13B, 8192)] * 3, fuyou_ceilings())
    for number in (1, 2):
        started = min(timed.start_seconds for timed in timeline.ops if timed.program == number)
        assert started >= timeline.finish_seconds[number - 1]


def test_the_closed_form_bounds_the_program():
    # It overlaps everything perfectly; in a program pipelines must fill, so that a step takes longer.
    for row in compare():
        elements, compute = row.point.shape.num_parameters, COMPUTE_FLOPS_PER_SECOND
        forward = 2 * elements * row.point.tokens / compute
        behind = max(2 * forward, 14 * elements / WRITE_BYTES_PER_SECOND)
        assert forward + behind <= row.simulated_seconds <= 1.15 * (forward + behind)


@settings(deadline=None, max_examples=20)
@given(layers=st.integers(1, 12), hidden=st.sampled_from([512, 2048, 5120]), tokens=st.integers(1, 1 << 17))
def test_any_shape_gives_a_program_that_runs(layers: int, hidden: int, tokens: int):
    shape = Shape(name="some", num_layers=layers, hidden_size=hidden)
    assert simulate([fuyou_program(shape, tokens)] * 3, fuyou_ceilings()).step_seconds > 0


@given(st.lists(st.integers(1, 100), min_size=1, max_size=50), st.integers(1, 200))
def test_groups_cover_all_modules_and_are_filled(modules: list[int], smallest: int):
    groups = group_modules(modules, smallest)
    assert [index for group in groups for index in group] == list(range(len(modules)))
    for group in groups[:-1]:
        assert sum(modules[index] for index in group) >= smallest
        assert sum(modules[index] for index in group[:-1]) < smallest


def test_the_table_has_a_column_for_another_program(rows: tuple[Row, ...]):
    assert table(rows).count("\n") == 2 + len(POINTS)
    assert "| - |" in table(rows)
    own = compare(lambda point: point.seconds / 2)
    assert f"| {2 * 42.8:.1f} |" in table(own)
