"""The space that is searched: the question, one choice of placement, and the plan that follows from it.

Pure: no clock, no files, no torch. `search` decides which choice is best, `policy` when updates run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.plan.forecast.footprint import with_footprint
from headrace.plan.search.paging import paged
from headrace.plan.search.parting import fitted, with_cached
from headrace.plan.search.problem import OF_GROUPS, Problem
from headrace.plan.value.block_tables import asked_tables, notes_on_tables
from headrace.plan.value.buffer_sizes import buffer_groups
from headrace.plan.value.choices import BatchShape, Gradients, Hosted, Stash, Updates
from headrace.plan.value.loss_chunks import loss_chunk_tokens, spared_sums
from headrace.plan.value.plan import AT_ONCE, Plan
from headrace.plan.value.results import Results
from headrace.plan.value.workload import Workload
from headrace.terms.costs import ModelCosts
from headrace.terms.cuts import least_chunk_elements
from headrace.terms.layout import UNIT_ALIGNMENT
from headrace.terms.sizes import round_up

# With more tokens than this a matrix product gets no faster per token.
_SATURATED_TOKENS = 2048
# Elements of a chunk of an update, and the chunks whose states are in memory at a time, by thrift. Small chunks take less
# memory and more operations; the more of them are in memory, the further ahead states are read.
_STATE_BUFFERS = ((8 << 20, 4), (4 << 20, 8), (4 << 20, 5), (4 << 20, 3), (1 << 20, 3), (1 << 16, 3))
_LEAST_STATE_SLOTS = 3
THRIFTS = tuple(range(len(_STATE_BUFFERS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One point of the space that is searched; `plan_of` makes the plan."""

    policy: str
    rows: int
    input_home: str
    kept_home: str = "device"
    amount: int = 0  # how many operator outputs of `replay_order` are kept
    held: str = "host"
    lean: bool = False
    freed_memory: str = "returned"
    chunk_elements: int
    state_slots: int

    @property
    def buffers(self) -> tuple[bool, int, int]:
        """The kind of its buffers: forecasts of choices of one kind have the same error."""
        return self.lean, self.chunk_elements, self.state_slots

    @property
    def state_elements(self) -> int:
        """Elements whose states pass through memory at a time."""
        return self.chunk_elements * self.state_slots


def placements_of(problem: Problem, policy: str, thrift: int) -> Iterator[Choice]:
    """Yield the placements without replay under an update policy and a thrift: thrift 0 has generous buffers, others have lean
    ones, with ever smaller chunks.

    Keeping freed memory only matters where the CPU computes, and the leanest thrift never keeps it.
    """
    chunk_elements, state_slots = state_buffers(problem, thrift)
    for home in problem.homes:
        for rows in _micro_batches(problem.workload):
            for held in ("host", "ssd") if policy == "deferred" else ("host",):
                for freed in ("kept", "returned") if thrift < THRIFTS[-1] and not problem.separate_device else ("returned",):
                    yield Choice(
                        policy=policy,
                        rows=rows,
                        input_home=home,
                        held=held,
                        lean=thrift > 0,
                        freed_memory=freed,
                        chunk_elements=chunk_elements,
                        state_slots=state_slots,
                    )


def plan_of(problem: Problem, choice: Choice) -> Plan:
    """Return the plan of a choice, with its footprint. It uses only what it needs of the budgets, not yet the rest."""
    costs, workload = problem.costs_of(choice.rows), problem.workload
    num_blocks, num_micro = len(costs.blocks), -(-workload.sequences // choice.rows)
    policy, units = choice.policy, problem.units
    spared = 0 if problem.separate_device or num_micro > 1 else spared_sums(units, costs)
    # A lean plan on a separate device holds one block there: its upload waits for compute, but a larger block fits.
    alone = problem.savings.one_block_in_host_memory or (choice.lean and problem.separate_device)
    prefetch = 0 if alone else 1 if choice.lean or num_blocks < 3 else 2
    kept: list[list[int]] = [[] for _ in costs.blocks]
    for block, ordinal in problem.replay_order(choice.rows)[: choice.amount]:
        kept[block].append(ordinal)
    plan = Plan(
        compute_dtype=problem.compute_dtype,
        separate_device=problem.separate_device,
        units=problem.units,
        num_blocks=num_blocks,
        tied=costs.tied,
        batch=BatchShape(
            sequence_length=workload.sequence_length,
            tokens_per_step=workload.tokens_per_step,
            micro_batch_sequences=choice.rows,
            num_micro_batches=num_micro,
            hidden_size_bytes=costs.hidden_size_bytes,
            loss_chunk_tokens=loss_chunk_tokens(costs, workload, choice.lean, spared),
            head_rows=costs.head_rows,
            head_passes=workload.head_passes,
        ),
        host_slots=1
        if problem.savings.one_block_in_host_memory
        else min(num_blocks, max(2, prefetch + 1 + (policy in AT_ONCE and not choice.lean))),
        device_slots=prefetch + 1 if problem.separate_device or any(unit.is_made for unit in units) else 0,
        prefetch=prefetch,
        compute_threads=workload.grouping.compute_threads if workload.grouping else problem.allowance.cores,
        stash=_stash(problem, choice, costs, kept),
        gradients=Gradients(
            dtype=problem.gradient_dtype or problem.compute_dtype,
            held=choice.held,
            slots=1 if choice.lean else 2,
            accumulate=num_micro > 1 or costs.by_samples,
            order=workload.gradient_sum,
        ),
        updates=_updates(problem, choice),
        results=_results(problem, costs, choice.rows * workload.sequence_length, kept),
        rule=problem.rule,
        own_rule=problem.own_rule,
        freed_memory=choice.freed_memory,
        **_saved(problem, choice),
        stage=problem.place.choices(num_micro) if problem.place else None,
    )
    plan = paged(plan, lean=choice.lean) if problem.savings.paged else plan
    return fitted(with_groups(plan, problem), problem, costs)


def _results(problem: Problem, costs: ModelCosts, tokens: int, kept: Sequence[Sequence[int]]) -> Results:
    """Return what a micro-batch of so many tokens computes, and what of it is not computed again."""
    tables = asked_tables(problem.tables, costs)
    return Results(
        spared_flops=tuple(
            sum(block.operators[ordinal].flops for ordinal in (*block.skippable, *ordinals))
            for block, ordinals in zip(costs.blocks, kept, strict=True)
        ),
        forward_flops=(0.0, *(block.forward_flops for block in costs.blocks), 0.0)[: len(problem.units)],
        attention_flops=tuple(block.attention_flops for block in costs.blocks),
        epilogue_flops=costs.epilogue_flops_per_token * tokens,
        tables=tables,
        notes=notes_on_tables(tables, tokens),
    )


def _stash(problem: Problem, choice: Choice, costs: ModelCosts, kept: Sequence[Sequence[int]]) -> Stash:
    tiers = tuple(choice.kept_home if ordinals else choice.input_home for ordinals in kept)
    return Stash(
        tiers=tiers,
        slots=0 if "ssd" not in tiers else 2 if choice.lean else 4,
        kept=tuple(tuple(sorted(ordinals)) for ordinals in kept),
        kept_bytes=tuple(_bytes_of(costs, block, ordinals) for block, ordinals in enumerate(kept)),
        skipped=tuple(block.skippable for block in costs.blocks),
        operators=problem.operators(choice.rows),
    )


def _saved(problem: Problem, choice: Choice) -> dict[str, Any]:
    """Return the fields of a plan that its savings decide."""
    savings = problem.savings
    return {
        "hosted": Hosted(**dict.fromkeys(("coming", "going"), 2 if choice.lean else 3)) if savings.hosted else None,
        "embedding": problem.embedding if savings.by_rows else None,
        "visiting_head": problem.head_home if savings.head_is_loaded_for_loss else None,
        "head_slot_bytes": problem.head_range_bytes if savings.head_is_loaded_for_loss and savings.head_in_row_ranges else None,
        "parts": savings.parts,
    }


def _updates(problem: Problem, choice: Choice) -> Updates:
    waits, units = choice.policy == "deferred", problem.units
    return Updates(
        policy=choice.policy,
        late_units=tuple(index for index, unit in enumerate(units) if unit.update_elements) if waits else (),
        # A step that is taken back returns to the last commit, which must be that of the step before.
        checkpoint_every=problem.workload.checkpoint_every or 1 if waits else 1,
        chunk_elements=choice.chunk_elements,
        state_slots=choice.state_slots,
        resident_states=(),
        threads=max(1, problem.allowance.cores // 2),
        # What multiplies whole matrices is the device's work, unless none is updated here, or only beside frozen weights.
        device_every=int(
            problem.separate_device
            and problem.rule.gram_products > 0
            and any(unit.update_elements and unit.in_place for unit in units)
        ),
    )


def with_groups(plan: Plan, problem: Problem) -> Plan:
    """Return a plan with the groups in which this run's packed rows are computed, and the note on them."""
    groups, notes = problem.groups(plan.batch.micro_batch_sequences)
    others = (note for note in plan.results.notes if not note.startswith(OF_GROUPS))
    return plan.with_results(groups=groups, notes=(*others, *notes))


def _bytes_of(costs: ModelCosts, block: int, ordinals: Sequence[int]) -> int:
    return sum(costs.blocks[block].operators[ordinal].output_bytes for ordinal in ordinals)


def filled(problem: Problem, plan: Plan) -> Plan:
    """Return `plan` with the rest of host memory used: first for weights (read twice a step) and experts, then for states
    (once).

    Before both, gradients of updates behind backward get a second buffer: with one, backward waits for each unit's update. A
    worker, all of whose units are far, keeps nothing more: its share of the model does not grow with the number of blocks.
    """
    if plan.is_at_once and plan.gradients.slots == 1:
        costs = problem.costs_of(plan.batch.micro_batch_sequences)
        two = with_footprint(plan.with_gradients(slots=2), costs, problem.allowance)
        plan = two if two.fits else plan
    if len(plan.far_units) == len(plan.units):
        return plan
    spare = plan.results.allowed_bytes["host"] - plan.peak("host")
    group = buffer_groups(plan)["host_weights"]
    slot_bytes = group.counted_bytes(problem.allowance.sharers) // group.count
    more = max(0, min(plan.num_blocks - plan.host_slots, spare // slot_bytes))
    plan, spare = with_cached(replace(plan, host_slots=plan.host_slots + more), spare - more * slot_bytes)
    # Immediate updates must be able to take a step back without a copy, and states that live only in memory have none.
    if plan.updates.policy == "deferred" and plan.host_slots >= plan.num_blocks:
        plan = with_resident_states(plan, spare)
    return with_footprint(plan, problem.costs_of(plan.batch.micro_batch_sequences), problem.allowance)


def with_resident_states(plan: Plan, spare_bytes: int) -> Plan:
    """Return `plan` with the states of as many units as fit kept in memory: shallow ones, which forward needs first, come
    first.
    """
    chosen: list[int] = []
    for unit in range(len(plan.units)):
        needed = plan.state_bytes(unit)
        if 0 < needed <= spare_bytes:  # a rule without states has none to keep
            chosen.append(unit)
            spare_bytes -= needed
    return plan.with_updates(resident_states=tuple(chosen))


def state_buffers(problem: Problem, thrift: int) -> tuple[int, int]:
    """Return elements of a chunk and slots for states. Where units, or an existing store, fix the chunk, lean buffers still
    take no more than the generous ones.
    """
    most = max(UNIT_ALIGNMENT, round_up(max(unit.update_elements for unit in problem.units), UNIT_ALIGNMENT))
    least = max(least_chunk_elements(unit.cuts) for unit in problem.units)
    sizes = [problem.allowance.chunk_elements or max(min(chunk, most), least) for chunk, _ in _STATE_BUFFERS]
    slots = _STATE_BUFFERS[thrift][1]
    generous = sizes[0] * _STATE_BUFFERS[0][1]
    return sizes[thrift], max(_LEAST_STATE_SLOTS, min(slots, generous // sizes[thrift]))


def _micro_batches(workload: Workload) -> list[int]:
    """Return micro-batch sizes in rows: from one that saturates compute down to one row. For each the rows divide evenly.

    Nine rows in eights would be eight and one; five and four take less memory, and serve a matrix product better.
    """
    if workload.grouping is not None:
        return [workload.grouping.rows]
    most = max(1, min(workload.sequences, _SATURATED_TOKENS // workload.sequence_length))
    sizes = [most >> halvings for halvings in range(most.bit_length())]
    counts = dict.fromkeys(-(-workload.sequences // size) for size in sizes)
    return [-(-workload.sequences // count) for count in counts]
