"""LuWu's policy on the joint clock reproduces what its authors published."""

import pytest
from luwu import POINTS, SHAPES, Point, closed_form_seconds, simulate_luwu

from headrace.peers.node.cluster import NODE, WORKER
from headrace.terms.lanes import Lane


def test_the_headline_is_its_closed_form_to_the_digit():
    # Facts of the paper: 100 Gbit/s, 26 GB/s each way of 12 SSDs, 14 bytes of a parameter; 16 rows of 1024 tokens.
    forward, backward = closed_form_seconds(175e9)
    assert (round(forward, 1), round(backward, 1), round(forward + backward, 1)) == (28.0, 94.2, 122.2)
    assert round(16 * 1024 / (forward + backward)) == 134


PUBLISHED = [point for point in POINTS if point.published is not None]


@pytest.mark.parametrize("point", PUBLISHED, ids=lambda point: f"{point.shape.name} x {point.workers}")
def test_published_points_are_reproduced_within_a_tenth(point: Point):
    found = point.tokens / simulate_luwu(point).step_seconds
    assert point.published is not None
    assert found == pytest.approx(point.published, rel=0.10)
    # Only one of them has been seen by a constant.
    assert point.fitted == (point.shape is SHAPES["1.3B"])


def test_a_step_takes_no_less_than_its_closed_form_and_hardly_more_where_that_limits():
    for point in POINTS:
        if point.shape.name in ("175B", "276B", "505B", "1T"):
            least = sum(closed_form_seconds(point.shape.num_parameters))
            assert least <= simulate_luwu(point).step_seconds <= 1.05 * least


def test_a_step_moves_what_the_paper_says():
    point = next(point for point in POINTS if point.shape.name == "13B")
    found, elements = simulate_luwu(point), point.shape.num_parameters
    moved = {seat: use.bytes for seat, use in found.uses.items()}
    assert moved[WORKER, Lane.NIC_DOWN] == moved[NODE, Lane.NIC_DOWN] == 4 * elements
    assert moved[WORKER, Lane.NIC_UP] == moved[NODE, Lane.NIC_UP] == 2 * elements
    assert moved[NODE, Lane.SSD_READ] == pytest.approx(16 * elements, rel=1e-6)
    assert moved[NODE, Lane.SSD_WRITE] == pytest.approx(14 * elements, rel=1e-6)


def test_shapes_have_the_parameters_that_are_published():
    for name, billions in (("1.3B", 1.3), ("13B", 13), ("175B", 175), ("276B", 276), ("505B", 505), ("1T", 1000)):
        assert SHAPES[name].num_parameters == pytest.approx(billions * 1e9, rel=0.02)
