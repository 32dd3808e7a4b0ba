"""The ledger derives what an operation waits for; upon it, a training step is what the builder before it made, to the bit."""

import pytest
import reference_builder as reference
from drawn_plans import plans
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine

from headrace.plan.ledger import Known, Ledger, Snapshot
from headrace.plan.plan import Plan
from headrace.plan.schedules.train import build_program, build_tail, redo
from headrace.plan.simulate import simulate
from headrace.terms.ceilings import Ceilings
from headrace.terms.program import PIECE_SHIFT, Lane, Op, Pool, Program, Verb, buffer

SAME = ("index", "verb", "lane", "unit", "micro", "chunk", "bytes", "flops", "late")
SLOTS = {
    Pool.HOST_WEIGHTS: "host_slot",
    Pool.DEVICE_WEIGHTS: "device_slot",
    Pool.STATES: "state_slot",
    Pool.GRADIENT: "gradient_slot",
    Pool.STASH: "stash_slot",
    Pool.DEVICE_STATES: "device_state_slot",
}
# What the flow looks up of each operation. Others had slots, too, that nobody read.
LOOKED_UP = {
    Verb.FETCH: {Pool.HOST_WEIGHTS},
    Verb.UPLOAD: {Pool.HOST_WEIGHTS, Pool.DEVICE_WEIGHTS},
    Verb.STASH: {Pool.STASH},
    Verb.SPILL: {Pool.STASH},
    Verb.UNSPILL: {Pool.STASH},
    Verb.RECALL: {Pool.STASH},
    Verb.DRAIN: {Pool.GRADIENT},
    Verb.HOLD: {Pool.GRADIENT},
    Verb.UNHOLD: {Pool.GRADIENT},
    Verb.READ_STATES: {Pool.STATES},
    Verb.STATES_TO_DEVICE: {Pool.HOST_WEIGHTS, Pool.STATES, Pool.GRADIENT, Pool.DEVICE_STATES},
    Verb.STATES_TO_HOST: {Pool.HOST_WEIGHTS, Pool.STATES, Pool.DEVICE_STATES},
    Verb.WRITE_STATES: {Pool.STATES},
    Verb.WRITE_WEIGHTS: {Pool.HOST_WEIGHTS},
}


def looked_up(plan: Plan, op: Op) -> set[Pool]:
    if op.verb in (Verb.FORWARD, Verb.BACKWARD):
        weights = Pool.DEVICE_WEIGHTS if plan.separate_device else Pool.HOST_WEIGHTS
        in_place = op.verb is Verb.BACKWARD and not plan.accumulate and not plan.separate_device
        return {weights, Pool.GRADIENT} if in_place else {weights}
    if op.verb is Verb.UPDATE:
        return {Pool.DEVICE_STATES} if op.is_on_device else {Pool.HOST_WEIGHTS, Pool.STATES, Pool.GRADIENT}
    return LOOKED_UP.get(op.verb, set())


def chains(plan: Plan, micros: list[int]) -> tuple[list[Program], list[Program]]:
    """Return consecutive programs of both builders, with the tail; then, where updates may be done again, those."""
    old, new = [], []
    carry, left = reference.cold_carry(plan), Snapshot()
    for micro in micros:
        program, carry = reference.build_program(plan, micro, carry)
        old.append(program)
        program, left = build_program(plan, micro, left)
        new.append(program)
    old.append(reference.build_tail(plan, carry)[0])
    new.append(build_tail(plan, left)[0])
    if plan.update_policy == "speculative":
        program, carry = reference.build_tail(plan, reference.redo_carry(plan))
        old += [program, reference.build_program(plan, 2, carry)[0]]
        program, left = build_tail(plan, redo(plan))
        new += [program, build_program(plan, 2, left)[0]]
    return old, new


@st.composite
def profiles(draw: st.DrawFn) -> Ceilings:
    """Machines on which now this, now that lane limits a step of small plans."""
    rates = {name: 10 ** draw(st.floats(6, 9)) for name in ("read", "write", "inward", "outward", "update", "device")}
    shared = draw(st.floats(0.5, 1))
    return machine(
        **rates,
        compute=10 ** draw(st.floats(8, 11)),
        mixed=shared * (rates["read"] + rates["write"]),
        both_ways=shared * (rates["inward"] + rates["outward"]),
        memory=rates["update"] * draw(st.floats(1, 3)),
    )


drawn = given(plans(), profiles(), st.lists(st.integers(1, 3), min_size=3, max_size=3))


@settings(max_examples=40, deadline=None)
@drawn
def test_the_ledger_gives_the_operations_and_the_times_of_the_builder_before_it(
    plan: Plan, ceilings: Ceilings, micros: list[int]
) -> None:
    assert_same(plan, ceilings, micros)


@pytest.mark.deep
@settings(max_examples=200, deadline=None)
@drawn
def test_the_ledger_gives_them_for_200_plans(plan: Plan, ceilings: Ceilings, micros: list[int]) -> None:
    assert_same(plan, ceilings, micros)


def assert_same(plan: Plan, ceilings: Ceilings, micros: list[int]) -> None:
    old, new = chains(plan, [*micros, micros[-1], micros[-1]])
    for one, other in zip(old, new, strict=True):
        assert [[getattr(op, name) for name in SAME] for op in one.ops] == [
            [getattr(op, name) for name in SAME] for op in other.ops
        ]
        for before, after in zip(one.ops, other.ops, strict=True):
            pools = looked_up(plan, after)
            assert {pool: after.slot(pool) for pool in pools} == {pool: getattr(before, SLOTS[pool]) for pool in pools}
    slow, fast = simulate(old, ceilings), simulate(new, ceilings)
    assert fast.finish_seconds == slow.finish_seconds
    assert fast.spans == slow.spans
    assert fast.step_seconds == slow.step_seconds


@settings(max_examples=30, deadline=None)
@given(plans(), st.integers(1, 3))
def test_programs_repeat_themselves_where_they_did(plan: Plan, num_micro: int) -> None:
    carry, left = reference.cold_carry(plan), Snapshot()
    for _ in range(12):
        _, after = reference.build_program(plan, num_micro, carry)
        _, follows = build_program(plan, num_micro, left)
        assert (after == carry) == (follows == left)
        carry, left = after, follows


A, B = buffer(Pool.HOST_WEIGHTS, 0), buffer(Pool.HOST_WEIGHTS, 1)
PIECE = 1 << PIECE_SHIFT


def after(ledger: Ledger) -> list[tuple[int, ...]]:
    """Return what each operation waits for, as references: those of the previous program are negative."""
    return [(*(~ref for ref in reversed(op.after_previous)), *op.after) for op in ledger.finish()[0].ops]


def test_readers_wait_for_the_writer_and_the_next_writer_for_all_of_them() -> None:
    ledger = Ledger(Snapshot())
    ledger.op(Verb.FETCH, Lane.SSD_READ, writes=(A,))
    ledger.op(Verb.FETCH, Lane.SSD_READ, writes=(B,))
    ledger.op(Verb.FORWARD, Lane.COMPUTE, (A, B))
    ledger.op(Verb.UPLOAD, Lane.HOST_TO_DEVICE, (A,))
    ledger.op(Verb.FETCH, Lane.SSD_READ, writes=(A,))
    assert after(ledger) == [(), (), (0, 1), (0,), (0, 2, 3)]


def test_pieces_wait_for_their_own_and_the_whole_for_all_of_them() -> None:
    ledger = Ledger(Snapshot())
    ledger.op(Verb.FETCH, Lane.SSD_READ, writes=(A,))
    for piece in (1, 2):
        ledger.op(Verb.STATES_TO_DEVICE, Lane.HOST_TO_DEVICE, writes=(A + piece * PIECE,))
        ledger.op(Verb.STATES_TO_HOST, Lane.DEVICE_TO_HOST, writes=(A + piece * PIECE,))
        ledger.op(Verb.WRITE_WEIGHTS, Lane.SSD_WRITE, (A + piece * PIECE,))
    ledger.op(Verb.FORWARD, Lane.COMPUTE, (A,))
    ledger.op(Verb.UPDATE, Lane.UPDATE, writes=(A + PIECE,))
    waits = after(ledger)
    assert waits[1:7] == [(0,), (1,), (2,), (0,), (4,), (5,)]
    assert waits[7] == (1, 2, 4, 5)
    assert {3, 6, 7} <= set(waits[8])


def test_of_operations_on_a_lane_that_ends_them_in_order_the_last_stands_for_all() -> None:
    ledger = Ledger(Snapshot())
    for _ in range(5):
        ledger.op(Verb.FORWARD, Lane.COMPUTE, (A,))
    for _ in range(2):
        ledger.op(Verb.WRITE_WEIGHTS, Lane.SSD_WRITE, (A,))
    ledger.op(Verb.FETCH, Lane.SSD_READ, writes=(A,))
    assert after(ledger)[-1] == (4, 5, 6)


def test_what_is_renewed_waits_for_nobody_and_is_waited_for() -> None:
    ledger = Ledger(Snapshot())
    for _ in range(2):
        ledger.op(Verb.DECIDE, Lane.COMPUTE, renews=(A,))
        ledger.op(Verb.COMMIT, Lane.COMMIT, (A,))
    assert after(ledger) == [(), (0,), (), (2,)]


def test_a_snapshot_knows_contents_and_hazards_of_one_program_and_no_older() -> None:
    ledger = Ledger(Snapshot())
    ledger.contents[A] = 7
    ledger.op(Verb.FETCH, Lane.SSD_READ, writes=(A,))
    ledger.op(Verb.FORWARD, Lane.COMPUTE, (A,))
    ledger.op(Verb.STASH, Lane.DEVICE_TO_HOST, (A,), (buffer(Pool.HOST_STASH, 3),))  # passing: not handed on
    _, left = ledger.finish()
    assert left == Snapshot((Known(A, 7, (0,), (1, 2)),))
    following = Ledger(left)
    assert following.contents == {A: 7}
    following.op(Verb.FETCH, Lane.SSD_READ, writes=(A,))
    assert after(following) == [(-3, -2, -1)]
    idle = Ledger(left)
    assert idle.finish()[1] == Snapshot((Known(A, 7, (), ()),))


def test_equal_knowledge_is_one_snapshot_however_it_came_about() -> None:
    one, other = Ledger(Snapshot()), Ledger(Snapshot())
    for ledger, order in ((one, (A, B)), (other, (B, A))):
        for each in order:
            ledger.contents[each] = 1
    other.op(Verb.FETCH, Lane.SSD_READ)
    assert one.finish()[1] == other.finish()[1]
    assert hash(one.finish()[1]) == hash(other.finish()[1])


@settings(max_examples=40, deadline=None)
@given(plans(), st.integers(1, 3))
def test_snapshots_of_steps_refer_to_the_last_program_only(plan: Plan, num_micro: int) -> None:
    left = redo(plan) if plan.update_policy == "speculative" else Snapshot()
    for _ in range(4):
        program, left = build_program(plan, num_micro, left)
        assert {left} == {left}
        assert [known.buffer for known in left.known] == sorted({known.buffer for known in left.known})
        for known in left.known:
            assert known.content >= 0 or known.writers or known.readers
            for refs in (known.writers, known.readers):
                assert list(refs) == sorted(set(refs))
                assert all(0 <= ref < len(program.ops) for ref in refs)
        for op in program.ops:
            assert all(ref < op.index for ref in op.after)
