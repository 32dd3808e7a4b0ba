"""Links: closed forms of every pattern, and what it means that copies share them fairly."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.peers.node.links import Crossing, Link, Network, Pattern
from headrace.terms.lanes import Lane

DOWN, UP = Lane.NIC_DOWN, Lane.NIC_UP
RATE = 12.5e9


def network(workers: int, pattern: Pattern = Pattern.EXCHANGE, nodes: int = 1) -> Network:
    link = Link.duplex(RATE)
    return Network(workers=workers, worker_link=link, node_link=link, nodes=nodes, pattern=pattern)


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 64])
def test_patterns_take_what_their_closed_forms_say(workers: int):
    exchange, switch, star = (network(workers, pattern) for pattern in Pattern)
    for lane in (DOWN, UP):
        assert exchange.alone_bytes_per_second(lane) == pytest.approx(RATE)
        assert switch.alone_bytes_per_second(lane) == pytest.approx(RATE)
        assert star.alone_bytes_per_second(lane) == pytest.approx(RATE / workers)
        wide = replace(exchange, widening=2.0)  # gradients of 16 bits, of 32 between workers
        assert wide.bytes_per_second((DOWN, UP))[lane] == pytest.approx(RATE / (3 - 2 / workers))
        # In backward, weights and gradients at once.
        assert exchange.bytes_per_second((DOWN, UP))[lane] == pytest.approx(RATE / (2 - 1 / workers))
        assert switch.bytes_per_second((DOWN, UP))[lane] == pytest.approx(RATE)
        assert star.bytes_per_second((DOWN, UP))[lane] == pytest.approx(RATE / workers)


@pytest.mark.parametrize(("nodes", "factor"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1)])
def test_as_many_nodes_as_workers_make_a_star_as_fast_as_a_switch(nodes: int, factor: int):
    assert network(8, Pattern.STAR, nodes).bytes_per_second((DOWN, UP))[UP] == pytest.approx(RATE / factor)


@pytest.mark.parametrize("workers", [1, 2, 5, 32])
@pytest.mark.parametrize("pattern", [Pattern.EXCHANGE, Pattern.SWITCH])
def test_a_node_has_one_copy_in_and_one_out_however_many_workers(workers: int, pattern: Pattern):
    down, up = network(workers, pattern).crossing(DOWN), network(workers, pattern).crossing(UP)
    assert (down.node_out, down.node_in, up.node_in, up.node_out) == (1, 0, 1, 0)
    assert (down.worker_in, up.worker_out) == (1, 1)
    relayed = (workers - 1) / workers if pattern is Pattern.EXCHANGE else 0
    assert (down.worker_out, up.worker_in) == (relayed, relayed)


def test_a_link_that_is_shared_carries_both_ways_in_turn():
    half = Link(in_bytes_per_second=RATE, out_bytes_per_second=RATE, both_bytes_per_second=RATE)
    found = Network(workers=1, worker_link=half, node_link=Link.duplex(RATE), pattern=Pattern.SWITCH)
    assert found.bytes_per_second((DOWN,))[DOWN] == pytest.approx(RATE)
    assert found.bytes_per_second((DOWN, UP)) == pytest.approx({DOWN: RATE / 2, UP: RATE / 2})
    uplink = Link(in_bytes_per_second=RATE, out_bytes_per_second=RATE, machines=4)
    shared = Network(workers=8, worker_link=uplink, node_link=Link.duplex(RATE), pattern=Pattern.SWITCH)
    assert shared.alone_bytes_per_second(DOWN) == pytest.approx(RATE / 4)


rates = st.floats(1e6, 1e12)
links = st.builds(
    Link,
    in_bytes_per_second=rates,
    out_bytes_per_second=rates,
    both_bytes_per_second=st.none() | rates,
    machines=st.integers(1, 4),
)
networks = st.builds(
    Network,
    workers=st.integers(1, 40),
    worker_link=links,
    node_link=links,
    nodes=st.integers(1, 4),
    pattern=st.sampled_from(Pattern),
)


def loads(found: Network) -> list[tuple[float, dict[Lane, float]]]:
    """Return every limit with what a byte of each lane's copy takes of it, written out anew."""
    made = []
    for end, link in (("worker", found.worker_link), ("node", found.node_link)):
        crossings: dict[Lane, Crossing] = {lane: found.crossing(lane) for lane in (DOWN, UP)}
        ways = {
            way: {lane: link.machines * getattr(crossing, f"{end}_{way}") for lane, crossing in crossings.items()}
            for way in ("in", "out")
        }
        made += [(link.in_bytes_per_second, ways["in"]), (link.out_bytes_per_second, ways["out"])]
        if link.both_bytes_per_second is not None:
            made.append((link.both_bytes_per_second, {lane: ways["in"][lane] + ways["out"][lane] for lane in (DOWN, UP)}))
    return made


@given(networks)
def test_no_link_carries_too_much_and_each_copy_is_held_back_by_a_full_one_where_it_is_the_fastest(found: Network):
    speeds = found.bytes_per_second((DOWN, UP))
    used = [(most, uses, sum(uses[lane] * speeds[lane] for lane in uses)) for most, uses in loads(found)]
    assert all(use <= most * (1 + 1e-9) for most, _, use in used)
    for lane in (DOWN, UP):
        full = [uses for most, uses, use in used if uses[lane] and use >= most * (1 - 1e-9)]
        assert any(all(speeds[lane] >= speeds[other] * (1 - 1e-9) for other in uses if uses[other]) for uses in full), (
            "max-min fair"
        )


@given(networks, st.floats(1, 10))
def test_faster_links_make_no_copy_slower(found: Network, factor: float):
    for end in ("worker_link", "node_link"):
        values = {each.name: getattr(found, each.name) for each in fields(found)}
        faster = Network(**values | {end: getattr(found, end).times(factor)})
        for lane in (DOWN, UP):
            assert faster.alone_bytes_per_second(lane) >= found.alone_bytes_per_second(lane) * (1 - 1e-9)
        both = (DOWN, UP)
        assert min(faster.bytes_per_second(both).values()) >= min(found.bytes_per_second(both).values()) * (1 - 1e-9)


@given(networks, st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_busy_link_is_busy_for_as_long_as_its_bytes_take(found: Network, down: float, up: float):
    expected = max((uses[DOWN] * down + uses[UP] * up) / most for most, uses in loads(found))
    assert found.busy_seconds({DOWN: down, UP: up}) == pytest.approx(expected)
