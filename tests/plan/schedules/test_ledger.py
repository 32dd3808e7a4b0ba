"""The ledger derives what an operation waits for."""

from drawn_plans import plans
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan.schedules.ledger import Known, Ledger, Snapshot
from headrace.plan.schedules.train import build_program, redo
from headrace.plan.value.plan import Plan
from headrace.terms.lanes import Lane
from headrace.terms.program import PASSING, PIECE_SHIFT, Pool, Verb, buffer

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


def test_a_piece_that_is_written_again_waits_for_those_who_read_it() -> None:
    ledger = Ledger(Snapshot())
    ledger.op(Verb.UPDATE, Lane.UPDATE, writes=(A + PIECE,))
    ledger.op(Verb.WRITE_WEIGHTS, Lane.SSD_WRITE, (A + PIECE,))
    ledger.op(Verb.UPDATE, Lane.UPDATE, writes=(A + PIECE,))
    ledger.op(Verb.UPDATE, Lane.UPDATE, writes=(A + 2 * PIECE,))
    assert after(ledger) == [(), (0,), (0, 1), ()]


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
    for passing in (Pool.HOST_STASH, PASSING):  # not handed on
        ledger.op(Verb.DRAIN, Lane.DEVICE_TO_HOST, (A,), (buffer(passing, 0),))
    _, left = ledger.finish()
    assert left == Snapshot((Known(A, 7, (0,), (1, 3)),))
    following = Ledger(left)
    assert following.contents == {A: 7}
    following.op(Verb.FETCH, Lane.SSD_READ, writes=(A,))
    assert after(following) == [(-4, -2, -1)]
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
    left = redo(plan) if plan.updates.policy == "speculative" else Snapshot()
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
