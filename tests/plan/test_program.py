"""The step's program is right for every plan: each operation finds in its buffers what it needs, and no two operations that
touch the same buffer, one of them writing, are left unordered. Checked symbolically over several steps, for random plans.
"""

import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from drawn_plans import plans
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_changes import changed
from small_plans import small_plan

from headrace.flow.run.execute import _Completion
from headrace.plan.forecast.footprint import MOST_PROGRAMS, program_bytes
from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.train import RECALLED_AHEAD, build_program, build_tail
from headrace.plan.value.buffer_sizes import buffer_groups
from headrace.plan.value.choices import Hosted
from headrace.plan.value.plan import Plan
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Pool, Program, Verb, Waiting
from headrace.terms.sizes import PAGE_BYTES

STEPS = 4  # of the drawn programs, before the tail
IN_ORDER_LANES = {Lane.COMPUTE, Lane.UPDATE, Lane.DEVICE_UPDATE, Lane.COMMIT, Lane.HOST_TO_DEVICE, Lane.DEVICE_TO_HOST}


@pytest.fixture(scope="module", autouse=True)
def small_pages() -> Iterator[None]:
    """Let blocks of small plans have several pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.plan.value.placement.LEAST_PAGE_BYTES", PAGE_BYTES)
        yield


def programs_of(plan: Plan, steps: int, num_micro: int) -> list[Program]:
    carry, programs = Snapshot(), []
    for step in range(steps):
        durable = step % plan.updates.checkpoint_every == 0
        program, carry = build_program(plan, num_micro, carry, durable=durable)
        programs.append(program)
    programs.append(build_tail(plan, carry)[0])
    return programs


class Memory:
    """What each buffer holds while the programs run in order. A content is (what, unit, chunk or micro, version or step)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.buffer: dict[tuple, object] = {}
        self.ssd_weights: dict[int, dict[int, int]] = {
            unit: dict.fromkeys(range(plan.num_chunks(unit)), 0) for unit in range(len(plan.units))
        }
        self.ssd_states = {(unit, chunk): 0 for unit, chunks in self.ssd_weights.items() for chunk in chunks}
        for unit in plan.resident_units:
            self.buffer["resident", unit] = (unit, dict(self.ssd_weights[unit]))
        self.versions = dict.fromkeys(range(len(plan.units)), 0)

    def host_key(self, op: Op) -> tuple:
        if op.slot(Pool.HOST_WEIGHTS) >= 0:
            return ("host", op.slot(Pool.HOST_WEIGHTS))
        return ("staging",) if self.plan.separate_device else ("resident", op.unit)


def perform(memory: Memory, op: Op, step: int) -> list[tuple]:
    """Check and change the contents that `op` touches; return its accesses: (buffer, writes) or (buffer, writes, chunk)."""
    return [*hosted_accesses(memory, op, step), *other_accesses(memory, op, step)]


HOSTED = (Waiting.HIDDEN, Waiting.HIDDEN_GRADIENT)


def hosted_accesses(memory: Memory, op: Op, step: int) -> list[tuple]:
    """As `perform`, for hidden states and their gradients that wait in host memory."""
    plan, buffer, unit, micro = memory.plan, memory.buffer, op.unit, op.micro
    if plan.hosted is None or not (op.waiting in HOSTED or op.slot(Pool.COMING) >= 0 or op.slot(Pool.GOING) >= 0):
        return []
    coming, going = ("coming", op.slot(Pool.COMING)), ("going", op.slot(Pool.GOING))
    assert coming[1] < plan.coming_slots and going[1] < plan.hosted.going, op.label  # noqa: PT018
    of_gradient = op.verb in (Verb.BACKWARD, Verb.PROLOGUE_BACKWARD) or op.waiting is Waiting.HIDDEN_GRADIENT
    unit = plan.num_blocks + 1 if op.verb is Verb.EPILOGUE else unit
    content = ("gradient", unit, micro, step) if of_gradient else (unit, micro, step)
    place = ("between", micro) if op.slot(Pool.BETWEEN) >= 0 else ("stash of", unit, micro)
    if op.waiting in HOSTED and op.verb is Verb.OUT:
        assert buffer[going] == content, f"{op.label} finds {buffer[going]}"
        buffer[place] = content
        return [(going, False), (place, True)]
    if op.waiting in HOSTED:
        assert buffer[place] == content, f"{op.label} finds {buffer[place]}"
        buffer[coming] = content
        return [(place, False), (coming, True)]
    accesses = []
    if (op.waiting, op.lane) == (Waiting.INPUT, Lane.DEVICE_TO_HOST):
        return [(going, False)]
    if coming[1] >= 0:
        assert buffer[coming] == content, f"{op.label} finds {buffer[coming]}"
        accesses.append((coming, False))
    if going[1] >= 0:
        made = {Verb.EPILOGUE: ("gradient", unit - 1, micro, step), Verb.BACKWARD: ("gradient", unit - 1, micro, step)}
        buffer[going] = made.get(op.verb, (unit + 1, micro, step))
        accesses.append((going, True))
    return accesses


def made_in_place(memory: Memory, op: Op, step: int) -> list[tuple]:
    """As `perform`, for gradients of an end that are made where they are drained to: those of a tied matrix twice."""
    plan, accesses = memory.plan, []
    for unit in sorted({op.unit, 0} if plan.tied else {op.unit}):
        key = ("gradient", plan.gradient_slot_of[unit])
        if op.verb is Verb.PROLOGUE_BACKWARD and plan.tied:
            assert memory.buffer[key] == ("made", unit, step), f"{op.label} finds {memory.buffer[key]}"
        memory.buffer[key] = ("made", unit, step)
        accesses.append((key, True))
    return accesses


def other_accesses(memory: Memory, op: Op, step: int) -> list[tuple]:
    plan, buffer, unit = memory.plan, memory.buffer, op.unit
    tail = [("gradient", op.slot(Pool.GRADIENT))] if op.slot(Pool.GRADIENT) >= 0 else []
    if op.waiting in HOSTED:
        return []
    if op.verb is Verb.FETCH:
        key = memory.host_key(op)
        buffer[key] = (unit, dict(memory.ssd_weights[unit]))
        return [(key, True), (("ssd weights", unit), False)]
    if op.verb is Verb.UPLOAD:
        source, into = (
            memory.host_key(op),
            ("device", op.slot(Pool.DEVICE_WEIGHTS)) if op.slot(Pool.DEVICE_WEIGHTS) >= 0 else ("resident", unit),
        )
        held, chunks = buffer[source]
        assert held == unit
        if op.chunk >= 0:  # a page; the first one makes those before it void
            pages = buffer["pages", into] = {**(buffer["pages", into] if op.chunk else {}), op.chunk: dict(chunks)}
            chunks = {(page, chunk): version for page, found in pages.items() for chunk, version in found.items()}
        buffer[into] = (unit, dict(chunks))
        return [(source, False), (into, True)]
    if op.verb in (Verb.FORWARD, Verb.BACKWARD):
        key = ("device", op.slot(Pool.DEVICE_WEIGHTS)) if plan.separate_device else ("host", op.slot(Pool.HOST_WEIGHTS))
        held, chunks = buffer[key]
        assert held == unit, f"{op.label} finds unit {held} in {key}"
        assert set(chunks.values()) == {step}, f"{op.label} at step {step} computes with versions {chunks}"
        accesses = [(key, False)]
        if op.verb is Verb.FORWARD:
            buffer["input", unit, op.micro] = step
            return [*accesses, (("hidden", op.micro), True)]
        tier = plan.stash.tiers[unit - 1]
        if tier == "ssd" and not plan.separate_device:
            assert buffer["stash", op.slot(Pool.STASH)] == (unit, op.micro, step)
            accesses.append((("stash", op.slot(Pool.STASH)), False))
        elif tier != "device":
            assert buffer["recalled", unit, op.micro] == step
        direct = not plan.gradients.accumulate and not plan.separate_device
        return [
            *accesses,
            (tail[0] if direct else ("accumulator", op.slot(Pool.ACCUMULATOR)), True),
            (("hidden", op.micro), True),
        ]
    if op.verb in (Verb.PROLOGUE, Verb.PROLOGUE_BACKWARD, Verb.EPILOGUE):
        used = (0,) if op.verb is not Verb.EPILOGUE else plan.resident_units
        for resident in used:
            held, chunks = buffer["resident", resident]
            assert held == resident
            assert set(chunks.values()) == {step}, f"{op.label} at step {step} computes with versions {chunks}"
        accesses = [(("resident", resident), False) for resident in used]
        if op.verb is Verb.PROLOGUE:
            return accesses
        return [*accesses, *(made_in_place(memory, op, step) if plan.ends_in_place else [(("resident accumulator",), True)])]
    if op.waiting is Waiting.INPUT:
        key = ("stash", op.slot(Pool.STASH)) if op.slot(Pool.STASH) >= 0 else ("stash of", unit, op.micro)
        key = ("between", op.micro) if op.slot(Pool.BETWEEN) >= 0 else key
        place = ("ssd stash", unit, op.micro)
        content = (unit, op.micro, step)
        if op.lane is Lane.DEVICE_TO_HOST:
            buffer[key] = content
            return [(key, True)]
        if op.lane is Lane.SSD_READ:
            assert buffer[place] == content
            buffer[key] = content
            return [(place, False), (key, True)]
        assert buffer[key] == content, f"{op.label} finds {buffer[key]}"
        if op.lane is Lane.SSD_WRITE:
            buffer[place] = content
            return [(key, False), (place, True)]
        buffer["recalled", unit, op.micro] = step
        return [(key, False)]
    if op.verb is Verb.DRAIN:
        resident = unit in plan.resident_units
        if in_place := resident and plan.ends_in_place:
            assert buffer[tail[0]] == ("made", unit, step), f"{op.label} finds {buffer[tail[0]]}"
        buffer[tail[0]] = (unit, step)
        source = ("resident accumulator",) if resident else ("accumulator", op.slot(Pool.ACCUMULATOR))
        direct = in_place or (not resident and not plan.gradients.accumulate and not plan.separate_device)
        return [(tail[0], True)] + ([] if direct else [(source, False)])
    if op.waiting is Waiting.GRADIENT and op.verb is Verb.OUT:
        assert buffer[tail[0]] == (unit, step)
        buffer["held", unit] = (unit, step)
        return [(tail[0], False), (("held", unit), True)]
    if op.waiting is Waiting.GRADIENT:
        buffer[tail[0]] = buffer["held", unit]
        return [(("held", unit), False), (tail[0], True)]
    if op.verb is Verb.READ_STATES:
        key = ("states", op.slot(Pool.STATES))
        buffer[key] = (unit, op.chunk, memory.ssd_states[unit, op.chunk])
        return [(("ssd states", unit, op.chunk), False), (key, True)]
    if op.verb is Verb.STATES_TO_DEVICE:
        of_step, key, staging = step - op.late, memory.host_key(op), ("device states", op.slot(Pool.DEVICE_STATES))
        assert buffer[tail[0]] == (unit, of_step), f"{op.label} at step {step} takes the gradient {buffer[tail[0]]}"
        held, chunks = buffer[key]
        assert held == unit
        assert chunks[op.chunk] == of_step
        buffer[staging] = (unit, op.chunk, of_step)
        accesses = [(tail[0], False), (key, False, op.chunk), (staging, True)]
        if op.slot(Pool.STATES) >= 0:
            assert buffer["states", op.slot(Pool.STATES)] == (unit, op.chunk, of_step)
            return [*accesses, (("states", op.slot(Pool.STATES)), False)]
        return [*accesses, (("resident states", unit, op.chunk), False)]
    if op.verb is Verb.STATES_TO_HOST:
        of_step, key, staging = step - op.late, memory.host_key(op), ("device states", op.slot(Pool.DEVICE_STATES))
        assert buffer[staging] == (unit, op.chunk, of_step + 1)
        held, chunks = buffer[key]
        assert held == unit
        assert chunks[op.chunk] == of_step
        chunks[op.chunk] = of_step + 1
        accesses = [(staging, False), (key, True, op.chunk)]
        if op.slot(Pool.STATES) >= 0:
            state = ("states", op.slot(Pool.STATES))
            assert buffer[state] == (unit, op.chunk, of_step)
            buffer[state] = (unit, op.chunk, of_step + 1)
            return [*accesses, (state, True)]
        buffer["resident states", unit, op.chunk] = of_step + 1
        return [*accesses, (("resident states", unit, op.chunk), True)]
    if op.verb is Verb.UPDATE and op.is_on_device:
        staging = ("device states", op.slot(Pool.DEVICE_STATES))
        assert buffer[staging] == (unit, op.chunk, step - op.late)
        buffer[staging] = (unit, op.chunk, step - op.late + 1)
        return [(staging, True)]
    if op.verb is Verb.UPDATE:
        of_step = step - op.late
        assert buffer[tail[0]] == (unit, of_step), f"{op.label} at step {step} uses the gradient {buffer[tail[0]]}"
        key = memory.host_key(op)
        held, chunks = buffer[key]
        assert held == unit
        assert chunks[op.chunk] == of_step
        chunks[op.chunk] = of_step + 1
        accesses = [(tail[0], False), (key, True, op.chunk)]
        if op.slot(Pool.STATES) >= 0:
            state = ("states", op.slot(Pool.STATES))
            assert buffer[state] == (unit, op.chunk, of_step)
            buffer[state] = (unit, op.chunk, of_step + 1)
            return [*accesses, (state, True)]
        buffer["resident states", unit, op.chunk] = of_step + 1
        return [*accesses, (("resident states", unit, op.chunk), True)]
    if op.verb is Verb.WRITE_STATES and unit in plan.updates.resident_states:
        key = ("resident states", unit, op.chunk)
        memory.ssd_states[unit, op.chunk] = buffer[key]
        return [(key, False), (("ssd states", unit, op.chunk), True), (("target slot",), False)]
    if op.verb is Verb.WRITE_STATES:
        key = ("states", op.slot(Pool.STATES))
        held, chunk, version = buffer[key]
        assert (held, chunk) == (unit, op.chunk)
        memory.ssd_states[unit, op.chunk] = version
        return [(key, False), (("ssd states", unit, op.chunk), True), (("target slot",), False)]
    if op.verb is Verb.WRITE_WEIGHTS:
        key = memory.host_key(op)
        held, chunks = buffer[key]
        assert held == unit
        memory.ssd_weights[unit][op.chunk] = chunks[op.chunk]
        return [(key, False, op.chunk), (("ssd weights", unit), True, op.chunk), (("target slot",), False)]
    if op.verb is Verb.COMMIT:
        of_step = step - op.late
        # Between checkpoints what stays in memory need not be on the drives.
        durable = step % plan.updates.checkpoint_every == 0 or step == STEPS
        apart = set() if durable else set(plan.staying_weights), set() if durable else set(plan.updates.resident_states)
        weights = [
            version for held, chunks in memory.ssd_weights.items() if held not in apart[0] for version in chunks.values()
        ]
        assert set(weights) <= {of_step + 1}
        assert {version for (held, _), version in memory.ssd_states.items() if held not in apart[1]} <= {of_step + 1}
        return [(("target slot",), True)]
    assert op.verb is Verb.DECIDE
    return [(("verdict", step), True)]


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(1, 3))
def test_each_operation_finds_what_it_needs_and_conflicts_are_ordered(plan: Plan, num_micro: int) -> None:
    memory = Memory(plan)
    before: list[int] = []  # per operation of all programs: the set of those that surely happen before it, as bits
    accesses: dict[tuple, list[tuple[int, bool, list[int]]]] = defaultdict(list)
    starts, lane_last = [], {}
    for step, program in enumerate(programs_of(plan, STEPS, num_micro)):
        starts.append(len(before))
        # A program starts when the last but one is complete.
        complete = (1 << starts[-2]) - 1 if step >= 1 else 0
        for op in program.ops:
            assert all(index < op.index for index in op.after)
            number = starts[-1] + op.index
            known = complete
            waits = [starts[-1] + index for index in op.after] + [starts[-2] + index for index in op.after_previous]
            if op.lane in IN_ORDER_LANES and op.lane in lane_last:
                waits.append(lane_last[op.lane])
            for wait in waits:
                known |= before[wait] | (1 << wait)
            before.append(known)
            lane_last[op.lane] = number
            for key, writes, *part in perform(memory, op, step):
                for other, other_writes, other_part in accesses[key]:
                    apart = part and other_part and part != other_part  # chunks of one buffer
                    if (writes or other_writes) and not (known >> other) & 1 and not apart:
                        raise AssertionError(
                            f"step {step}: {op.label} is not ordered after operation {other}; both touch {key}"
                        )
                accesses[key].append((number, writes, part))


# Rings of buffers: what an operation names there is taken for its content, and that is followed above.
RINGS = {
    Pool.HOST_WEIGHTS: "host_weights",
    Pool.DEVICE_WEIGHTS: "device_weights",
    Pool.STATES: "states",
    Pool.DEVICE_STATES: "device_states",
    Pool.GRADIENT: "gradients",
    Pool.ACCUMULATOR: "accumulator",
    Pool.STASH: "stash",
}


@settings(max_examples=60, deadline=None)
@given(plans(), st.integers(1, 3))
def test_no_operation_takes_a_slot_beyond_its_ring(plan: Plan, num_micro: int) -> None:
    groups = buffer_groups(plan)
    for program in programs_of(plan, STEPS, num_micro):
        for op in program.ops:
            for pool, name in RINGS.items():
                if pool is Pool.GRADIENT and op.slot(pool) >= plan.gradients.slots:
                    unit = 0 if op.verb is Verb.EPILOGUE and plan.tied else op.unit  # a tied head's comes first
                    assert op.slot(pool) == plan.gradient_slot_of[unit], op.label
                elif op.slot(pool) >= 0:
                    assert op.slot(pool) < groups[name].count, f"{op.label}: {pool.name} has {groups[name].count}"


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("num_micro", [1, 2, 8])
@pytest.mark.parametrize(("tier", "slots"), [("host", 4), ("ssd", 4), ("ssd", 18)])
def test_no_more_is_recalled_than_the_plan_counts(tier: str, slots: int, num_micro: int, prefetch: int) -> None:
    """However far the copies get ahead of compute: nothing but the dependencies holds them back from the device's memory."""
    plan = small_plan(6, separate_device=True, device_slots=3, prefetch=prefetch, stash_tiers=(tier,) * 6, stash_slots=slots)
    ops = programs_of(plan, 3, num_micro)[2].ops
    backwards = [op.index for op in ops if op.verb is Verb.BACKWARD]
    last_forward = max(op.index for op in ops if op.verb is Verb.FORWARD)
    peaks = []
    for used, awaited in enumerate([last_forward, *backwards]):
        behind: set[int] = set()
        for op in ops:
            if (op.lane is Lane.COMPUTE and op.index >= awaited) or behind.intersection(op.after):
                behind.add(op.index)
        recalled = sum((op.waiting, op.lane) == (Waiting.INPUT, Lane.HOST_TO_DEVICE) and op.index not in behind for op in ops)
        peaks.append(recalled - max(0, used - 1))
    assert peaks[0] == 0
    assert max(peaks) == RECALLED_AHEAD + 1  # `footprint` has one more, which compute may still be reading


def test_states_are_read_after_the_step_before_has_written_them() -> None:
    """Also those of a chunk whose unit was begun to be written in this step; the other slot, to which it goes, is free."""
    units = small_plan(2).units[:3]
    plan = small_plan(2, separate_device=True, prefetch=0, device_slots=1, host_slots=2, late_units=(0,), gradient_slots=1)
    before, program, *_ = programs_of(changed(plan, units=units, accumulate=False), 2, 1)
    written = {(op.unit, op.chunk): op.index for op in before.ops if op.verb is Verb.WRITE_STATES}
    reads = [op for op in program.ops if op.verb is Verb.READ_STATES and not op.late]
    assert len(reads) == 4
    assert all(written[op.unit, op.chunk] in op.after_previous for op in reads)


def test_pages_cover_each_block_and_take_turns_with_micro_batches() -> None:
    """Between two pages of a block that is not waited for lies one use of a block."""
    plan = small_plan(6, separate_device=True, device_slots=2, host_slots=4, prefetch=1, pages=True, num_micro_batches=4)
    ops = programs_of(plan, 3, 4)[2].ops
    pages = [op for op in ops if op.verb is Verb.UPLOAD and op.unit == 4]
    assert [op.chunk for op in pages] == [0, 1, 2, 3] * 2  # for forward, and again for backward
    assert sum(op.bytes for op in pages) == 2 * plan.sent_bytes(4)
    for before, after in pairwise(pages[:4]):
        assert [op.verb for op in ops[before.index : after.index] if op.lane is Lane.COMPUTE] == [Verb.FORWARD]


def test_weights_are_read_before_states_that_updates_read() -> None:
    """Where weights come in pages, those of the next block but one are asked for before a block is updated."""
    plan = small_plan(8, separate_device=True, device_slots=2, host_slots=4, prefetch=1, pages=True)
    ops = programs_of(plan, 3, 2)[2].ops
    fetched = {op.unit: op.index for op in ops if op.verb is Verb.FETCH and 3 <= op.unit <= 5}
    backwards = {op.unit: op.index for op in reversed(ops) if op.verb is Verb.BACKWARD}
    assert all(index < backwards[unit + 2] for unit, index in fetched.items())


@pytest.mark.parametrize(("coming", "going"), [(1, 1), (2, 3), (9, 9)])
@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_no_more_hidden_states_are_on_the_device_than_there_are_slots(tier: str, coming: int, going: int) -> None:
    """Copies that bring them get as far ahead of compute, and those that take them away as far behind, as is allowed."""
    plan = small_plan(
        4,
        separate_device=True,
        device_slots=2,
        stash_tiers=(tier,) * 4,
        stash_slots=4,
        kept_bytes=(512, 0) * 2,
        hosted=Hosted(coming=coming, going=going),
    )
    ops = programs_of(plan, 3, 6)[2].ops
    newest: dict[Lane, int] = {}
    waits: list[set[int]] = []  # of each operation: those that it waits for, and the one before it on its lane
    for op in ops:
        waits.append({*op.after, *([newest[op.lane]] if op.lane in newest and op.lane in IN_ORDER_LANES else [])})
        newest[op.lane] = op.index
    used = made = 0
    for awaited in (op for op in ops if op.lane is Lane.COMPUTE):
        behind, ended = {awaited.index}, set(waits[awaited.index])  # what has not begun when it begins, and what has ended
        for op in ops[awaited.index :]:
            behind.update({op.index} if behind & waits[op.index] else ())
        for op in reversed(ops[: awaited.index]):
            ended.update(waits[op.index] if op.index in ended else ())
        brought = sum(op.waiting in HOSTED and op.verb is Verb.IN and op.index not in behind for op in ops)
        assert brought - used <= coming
        used, made = used + (awaited.slot(Pool.COMING) >= 0), made + (awaited.slot(Pool.GOING) >= 0)
        left = sum(ops[index].waiting in HOSTED and ops[index].verb is Verb.OUT for index in ended)
        assert awaited.slot(Pool.GOING) < 0 or made - left <= going, "compute waits until enough has left"


def test_weights_are_read_twice_and_written_once_without_a_cache() -> None:
    plan = small_plan(6, host_slots=2, prefetch=1)
    program = programs_of(plan, 5, 2)[3]
    fetched = [op.unit for op in program.ops if op.verb is Verb.FETCH]
    # Two slots: the turn from forward to backward and the one from step to step find two blocks each where they are.
    assert len(fetched) == 2 * 6 - 4


def test_a_slot_for_each_block_ends_all_reading_of_weights() -> None:
    plan = small_plan(5, host_slots=5)
    program = programs_of(plan, 4, 1)[2]
    assert not [op for op in program.ops if op.verb is Verb.FETCH]


@pytest.mark.parametrize("policy", ["immediate", "deferred"])
def test_the_program_repeats_itself(policy: str) -> None:
    programs = programs_of(small_plan(5, update_policy=policy), 10, 2)
    assert programs[7] in (programs[8], programs[6])


@pytest.mark.parametrize("policy", ["immediate", "deferred", "speculative"])
@pytest.mark.parametrize("every", [0, 1, 2, 3])
def test_each_kth_chunk_is_updated_on_the_device_and_every_chunk_somewhere(policy: str, every: int) -> None:
    plan = small_plan(4, separate_device=True, device_slots=2, update_policy=policy, device_update_every=every)
    program = programs_of(plan, 3, 1)[2]
    updates = sorted((op for op in program.ops if op.verb is Verb.UPDATE), key=lambda op: (op.unit, op.chunk))
    assert [(op.unit, op.chunk) for op in updates] == [(unit, chunk) for unit in range(6) for chunk in range(2)]
    there = [number for number, op in enumerate(updates, start=1) if op.is_on_device]
    assert there == [number for number in range(1, 13) if every and number % every == 0]
    for verb, width in ((Verb.STATES_TO_DEVICE, 14), (Verb.STATES_TO_HOST, 12)):
        assert [op.bytes for op in program.ops if op.verb is verb] == [4096 * width] * len(there)


def test_without_a_device_of_its_own_the_host_updates_all() -> None:
    program = programs_of(small_plan(3, device_update_every=1), 2, 1)[1]
    assert {op.lane for op in program.ops if op.verb is Verb.UPDATE} == {Lane.UPDATE}


def test_the_first_deferred_step_updates_nothing_and_the_tail_updates_everything() -> None:
    plan = small_plan(3, update_policy="deferred")
    first, *_, tail = programs_of(plan, 1, 1)
    assert not [op for op in first.ops if op.verb is Verb.UPDATE]
    assert {op.unit for op in tail.ops if op.verb is Verb.UPDATE} == set(range(5))
    assert tail.ops[-1].verb is Verb.COMMIT


@pytest.mark.wide
@pytest.mark.parametrize("policy", ["immediate", "deferred"])
def test_operations_of_many_chunks_take_no_more_memory_than_the_plan_counts(policy: str) -> None:
    """Of a unit of 500 chunks each may wait for all of them, a step later: seen as 2200 bytes for an operation."""
    units = tuple(replace(unit, num_elements=500 * 2048) for unit in small_plan().units)
    late = tuple(range(len(units))) if policy == "deferred" else ()
    plan = small_plan(units=units, chunk_elements=2048, update_policy=policy, late_units=late)
    carry = Snapshot()
    for _ in range(3):
        _, carry = build_program(plan, plan.batch.num_micro_batches, carry)
    tracemalloc.start()
    try:
        program, _ = build_program(plan, plan.batch.num_micro_batches, carry)
        of_program, _ = tracemalloc.get_traced_memory()
        marks = [_Completion() for _ in program.ops]
        of_marks = tracemalloc.get_traced_memory()[0] - of_program
    finally:
        tracemalloc.stop()
    assert len(marks) == len(program.ops) > 4 * 6 * 500
    taken = MOST_PROGRAMS * of_program + 2 * of_marks
    assert 0.8 * program_bytes(plan) < taken < program_bytes(plan)
