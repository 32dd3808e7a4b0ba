"""Choose a plan: of the placements that fit into the budgets, the one that the simulator finds fastest.

Pure: model costs, budgets, a workload and a machine's ceilings in, a frozen `Plan` out. No clock, no files, no torch.

What is decided (Fuyou's automatic activation management, extended to the whole placement): rows per micro-batch; where block
inputs wait for backward; how many operator outputs are kept and replayed instead of computed again, in falling order of
floating-point operations saved per byte (Fuyou's benefit OB = FLOP / A), and where they wait; buffer depths; and what is left
of host memory goes to weights, then states. Step time is convex in the amount kept (each lane's work is linear in it, the step
is about their maximum), so few amounts need to be tried.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from headrace.plan.base import Plan, Speculation, Unit, spread
from headrace.plan.footprint import Allowance, with_footprint
from headrace.plan.forecast import forecast, redo_seconds
from headrace.plan.memory import buffer_groups
from headrace.spec.ceilings import Ceilings
from headrace.spec.costs import ModelCosts
from headrace.spec.errors import InputError, PlanInfeasible
from headrace.spec.layout import UNIT_ALIGNMENT, UnitLayout
from headrace.spec.sizes import MIB, format_bytes, round_up

# Logits and their gradients of one chunk of positions stay below this; the head's speed no longer depends on it.
_LOSS_CHUNK_BYTES = 96 * MIB
# Beyond this many tokens a matrix product is as fast per token as it gets.
_SATURATED_TOKENS = 2048
# Elements of a chunk of an update, by thrift: small ones take less memory and more operations.
_CHUNK_CHOICES = (8 << 20, 1 << 20, 1 << 16)
# Amounts of kept outputs that are tried, in parts of all; around the best one, half steps are tried besides.
_AMOUNT_PARTS = 4
# Placements whose forecast without replay is best go into the search for the amount.
_FINALISTS = 2
# A forecast within the search is coarse; plans closer than this are alike, and the simpler one (tried first) is taken.
_SEARCH_OPERATIONS = 800
# Shares of the blocks whose updates may be held for the next forward: 0, 1/8, ... 7/8.
_LATE_PARTS = 8
# Strides at which chunks may be updated on the device; of strides that are alike the largest, which moves the least.
_DEVICE_UPDATE_STRIDES = (4, 3, 2, 1)
_ALIKE = 1.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step is: tokens, in rows of `sequence_length`; whether the global norm must be known before updates."""

    tokens_per_step: int
    sequence_length: int
    clip: bool
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        if self.sequence_length < 1 or self.tokens_per_step < 1:
            raise InputError(
                f"tokens_per_step and sequence_length must be positive, found {self.tokens_per_step} and {self.sequence_length}"
            )
        if self.tokens_per_step % self.sequence_length:
            low = self.tokens_per_step // self.sequence_length * self.sequence_length
            raise InputError(
                f"tokens_per_step {self.tokens_per_step} is not a multiple of sequence_length {self.sequence_length}; "
                f"use {max(low, self.sequence_length)} or {low + self.sequence_length}"
            )

    @property
    def sequences(self) -> int:
        """Rows of a step."""
        return self.tokens_per_step // self.sequence_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model laid out as `layouts`, with `costs_of(sequences)` per micro-batch, to be trained within `allowance`."""

    layouts: tuple[UnitLayout, ...]
    costs_of: Callable[[int], ModelCosts]
    workload: Workload
    allowance: Allowance
    compute_dtype: str = "bfloat16"
    gradient_dtype: str | None = None

    @property
    def separate_device(self) -> bool:
        """Whether there is a device budget."""
        return self.allowance.device_bytes is not None

    @property
    def homes(self) -> tuple[str, ...]:
        """Where block inputs and kept outputs may wait, nearest first."""
        return ("device", "host", "ssd") if self.separate_device else ("device", "ssd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One point of the space that is searched; `plan_of` makes the plan."""

    rows: int
    input_home: str
    kept_home: str = "device"
    amount: int = 0  # of `replay_order`: how many operator outputs are kept
    held: str = "host"
    lean: bool = False
    chunk_elements: int


def make_plan(problem: Problem, ceilings: Ceilings | None = None) -> Plan:
    """Return the fastest plan that fits, by the simulator on a machine with `ceilings` (None: a nominal machine).

    Raises:
        PlanInfeasible: nothing fits; names the tier, what the leanest plan needs there, and what takes most of it.
    """
    machine = ceilings or nominal_ceilings(problem)
    placements = _fitting(problem)
    homes = problem.homes
    if ceilings is None:
        # Nobody measured the drives: they are not written to for speed, only where memory does not suffice.
        homes = homes[:-1]
        placements = [choice for choice in placements if choice.input_home != "ssd"] or placements

    def seconds(choice: Choice) -> float:
        plan = filled(problem, plan_of(problem, choice))
        return forecast(plan, machine, most_operations=_SEARCH_OPERATIONS).step_seconds

    ranked = sorted(((seconds(choice), index) for index, choice in enumerate(placements)))
    best_seconds, best = ranked[0][0], placements[ranked[0][1]]
    for _, index in ranked[:_FINALISTS]:
        for home in homes:
            found_seconds, found = _best_amount(problem, replace(placements[index], kept_home=home), seconds)
            if found_seconds * _ALIKE < best_seconds:
                best_seconds, best = found_seconds, found
    plan = filled(problem, plan_of(problem, best))
    if plan.update_policy == "immediate":
        return _with_device_updates(problem, _balanced(problem, plan_of(problem, best), plan, machine), machine)
    if plan.resident_states:
        # States in memory are not read, but each commit writes them in one go; what is better depends on how often that is.
        streamed = with_footprint(
            replace(plan, resident_states=()), problem.costs_of(plan.micro_batch_sequences), problem.allowance
        )
        plan = min((streamed, plan), key=lambda candidate: forecast(candidate, machine).step_seconds)
    plan = _with_device_updates(problem, plan, machine)
    # What lives only in memory cannot be taken back.
    return plan if plan.resident_states or plan.checkpoint_every > 1 else _with_speculation(plan, machine)


def _balanced(problem: Problem, bare: Plan, best: Plan, machine: Ceilings) -> Plan:
    """Return `best`, or a plan with late units and more states read ahead if it is faster: `bare` has nothing filled in yet.

    Updates behind backward leave drives idle in forward. Some units' updates are held for it, as many as make both halves
    equally long; which ones matters little as long as they are spread evenly over the depth.
    """
    best_seconds = forecast(best, machine).step_seconds
    unit_chunks = -(-bare.largest_block_elements // bare.chunk_elements)
    for held in ("host", "ssd"):
        for slots in sorted({bare.state_slots, max(bare.state_slots, unit_chunks + 2)}):
            found = []
            for late in late_choices(bare):
                plan = with_footprint(
                    replace(bare, late_units=late, held_gradients=held, state_slots=slots),
                    problem.costs_of(bare.micro_batch_sequences),
                    problem.allowance,
                )
                if fits(plan) and (late or held == "host"):
                    plan = filled(problem, plan)
                    found.append(
                        (forecast(plan, machine, most_operations=2 * _SEARCH_OPERATIONS).step_seconds, len(late), plan)
                    )
            if found:
                plan = min(found, key=lambda entry: entry[:2])[2]
                seconds = forecast(plan, machine).step_seconds
                if seconds * _ALIKE < best_seconds:
                    best_seconds, best = seconds, plan
    return best


def _with_device_updates(problem: Problem, plan: Plan, machine: Ceilings) -> Plan:
    """Return `plan` with a stride of its chunks updated on the device, if that fits there and makes the step shorter.

    What it takes are two chunks and temporaries on the device, and 26 bytes per parameter over the link (bfloat16) instead of
    as many over the host's memory bus. It pays where the CPU's updates limit the step and the link has time to spare.
    """
    if not (problem.separate_device and machine.has_device):
        return plan

    def seconds(candidate: Plan, ceilings: Ceilings) -> float:
        return forecast(candidate, ceilings, most_operations=2 * _SEARCH_OPERATIONS).step_seconds

    # No stride can gain more than updates that take the CPU no time would: mostly nothing, and the search ends here.
    free = replace(
        machine, update_bytes_per_second=1e15, update_bytes_per_second_per_core=1e15, host_memory_bytes_per_second=1e17
    )
    as_is = seconds(plan, machine)
    if seconds(plan, free) * _ALIKE >= as_is:
        return plan
    costs = problem.costs_of(plan.micro_batch_sequences)
    strides = [
        with_footprint(replace(plan, device_update_every=every), costs, problem.allowance) for every in _DEVICE_UPDATE_STRIDES
    ]
    tried = [(seconds(candidate, machine), candidate) for candidate in strides if fits(candidate)]
    best_seconds, best = min(tried, key=lambda entry: entry[0], default=(as_is, plan))
    if best_seconds * _ALIKE >= as_is:
        return plan
    # Coarse forecasts say which stride; whether it pays is worth a finer look.
    return best if forecast(best, machine).step_seconds * _ALIKE < forecast(plan, machine).step_seconds else plan


def late_choices(plan: Plan) -> list[tuple[int, ...]]:
    """Return the sets of units that are tried as late ones: so many parts of the blocks, evenly spread."""
    counts = dict.fromkeys(round(plan.num_blocks * part / _LATE_PARTS) for part in range(_LATE_PARTS))
    return [spread(count, plan.num_blocks) for count in counts]


def _with_speculation(plan: Plan, machine: Ceilings) -> Plan:
    """Return a deferred plan with the costs of speculating beside it: the same buffers, another order."""
    variants = [replace(plan, update_policy="speculative", late_units=late) for late in late_choices(plan)]
    seconds = [forecast(variant, machine, most_operations=2 * _SEARCH_OPERATIONS).step_seconds for variant in variants]
    variant = variants[min(range(len(variants)), key=seconds.__getitem__)]
    speculation = Speculation(
        late_units=variant.late_units,
        deferred_seconds=forecast(plan, machine).step_seconds,
        hit_seconds=forecast(variant, machine).step_seconds,
        redo_seconds=redo_seconds(variant, machine),
    )
    return replace(plan, speculation=speculation)


def _fitting(problem: Problem) -> list[Choice]:
    """Return the placements without replay that fit; those of the thriftiest kind only if no other does."""
    for kinds in ((0, 1), (2,)):
        found = [choice for kind in kinds for choice in placements_of(problem, kind) if fits(plan_of(problem, choice))]
        if found:
            return found
    raise _infeasible(min((plan_of(problem, choice) for choice in placements_of(problem, 2)), key=_excess))


def placements_of(problem: Problem, thrift: int) -> Iterator[Choice]:
    """Yield the placements without replay of a thrift: 0 has generous buffers, 1 lean ones, 2 the leanest."""
    clips = problem.workload.clip or problem.compute_dtype == "float16"
    chunk_elements = problem.allowance.chunk_elements or _chunk_elements(problem, thrift)
    for home in problem.homes:
        for rows in _micro_batches(problem.workload):
            for held in ("host", "ssd") if clips else ("host",):
                yield Choice(rows=rows, input_home=home, held=held, lean=thrift > 0, chunk_elements=chunk_elements)


def _best_amount(problem: Problem, start: Choice, seconds: Callable[[Choice], float]) -> tuple[float, Choice]:
    """Return the best amount of kept outputs for a placement: a coarse grid, then half steps around its best point."""
    total = len(replay_order(problem.costs_of(start.rows)))
    tried: dict[int, float] = {}

    def try_amounts(amounts: list[int]) -> None:
        for amount in amounts:
            choice = replace(start, amount=amount)
            if amount not in tried and fits(plan_of(problem, choice)):
                tried[amount] = seconds(choice)

    try_amounts([total * part // _AMOUNT_PARTS for part in range(_AMOUNT_PARTS + 1)])
    step = total // _AMOUNT_PARTS
    while tried and step > max(1, total // 24):
        step //= 2
        centre = min(tried, key=lambda amount: (tried[amount], amount))
        try_amounts([amount for amount in (centre - step, centre + step) if 0 <= amount <= total])
    if not tried:
        return float("inf"), start
    best = min(tried, key=lambda amount: (tried[amount], amount))
    return tried[best], replace(start, amount=best)


def replay_order(costs: ModelCosts) -> list[tuple[int, int]]:
    """Return all (block, ordinal) whose output may be kept, best benefit per byte first (Fuyou: OB = FLOP / A).

    Of equal benefit, deep blocks first: theirs wait shortest. Outputs that recompute skips anyway are not among them.
    """
    pairs = [
        (block, ordinal)
        for block, costs_of_block in enumerate(costs.blocks)
        for ordinal in range(len(costs_of_block.operators))
        if ordinal not in costs_of_block.skippable
    ]

    def benefit(pair: tuple[int, int]) -> float:
        operator = costs.blocks[pair[0]].operators[pair[1]]
        return operator.flops / max(1, operator.output_bytes)

    return sorted(pairs, key=lambda pair: (-benefit(pair), -pair[0], pair[1]))


def plan_of(problem: Problem, choice: Choice) -> Plan:
    """Return the plan of a choice, with its footprint; nothing of what is left of the budgets is used yet."""
    costs, workload = problem.costs_of(choice.rows), problem.workload
    num_blocks, num_micro = len(costs.blocks), -(-workload.sequences // choice.rows)
    clips = workload.clip or problem.compute_dtype == "float16"
    policy = "deferred" if clips else "immediate"
    # A lean plan on a separate device holds one block there: its upload waits for compute, but a larger block fits.
    prefetch = 0 if choice.lean and problem.separate_device else 1 if choice.lean or num_blocks < 3 else 2
    kept: list[list[int]] = [[] for _ in costs.blocks]
    for block, ordinal in replay_order(costs)[: choice.amount]:
        kept[block].append(ordinal)
    tiers = tuple(choice.kept_home if ordinals else choice.input_home for ordinals in kept)
    plan = Plan(
        compute_dtype=problem.compute_dtype,
        gradient_dtype=problem.gradient_dtype or problem.compute_dtype,
        separate_device=problem.separate_device,
        units=tuple(
            Unit(name=layout.name, num_elements=layout.num_elements, num_parameters=layout.num_parameters)
            for layout in problem.layouts
        ),
        num_blocks=num_blocks,
        tied=costs.tied,
        sequence_length=workload.sequence_length,
        tokens_per_step=workload.tokens_per_step,
        micro_batch_sequences=choice.rows,
        num_micro_batches=num_micro,
        hidden_size_bytes=costs.hidden_size_bytes,
        loss_chunk_tokens=_loss_chunk_tokens(costs, workload, choice.lean),
        update_policy=policy,
        held_gradients=choice.held,
        late_units=tuple(range(len(problem.layouts))) if policy == "deferred" else (),
        # A step that is taken back goes back to the last commit: that must be the step before.
        checkpoint_every=workload.checkpoint_every or 1 if policy == "deferred" else 1,
        host_slots=min(num_blocks, max(2, prefetch + 1 + (policy == "immediate" and not choice.lean))),
        device_slots=prefetch + 1 if problem.separate_device else 0,
        prefetch=prefetch,
        chunk_elements=choice.chunk_elements,
        state_slots=3 if choice.lean else 4,
        gradient_slots=1 if choice.lean else 2,
        resident_states=(),
        stash_tiers=tiers,
        stash_slots=0 if "ssd" not in tiers else 2 if choice.lean else 4,
        kept=tuple(tuple(sorted(ordinals)) for ordinals in kept),
        kept_bytes=tuple(_bytes_of(costs, block, ordinals) for block, ordinals in enumerate(kept)),
        skipped=tuple(block.skippable for block in costs.blocks),
        operators=tuple(tuple(operator.name for operator in block.operators) for block in costs.blocks),
        spared_flops=tuple(
            sum(block.operators[ordinal].flops for ordinal in (*block.skippable, *ordinals))
            for block, ordinals in zip(costs.blocks, kept, strict=True)
        ),
        accumulate=num_micro > 1,
        compute_threads=problem.allowance.cores,
        update_threads=max(1, problem.allowance.cores // 2),
        forward_flops=(0.0, *(block.forward_flops for block in costs.blocks), 0.0)[: len(problem.layouts)],
        epilogue_flops=costs.epilogue_flops_per_token * choice.rows * workload.sequence_length,
    )
    return with_footprint(plan, costs, problem.allowance)


def _bytes_of(costs: ModelCosts, block: int, ordinals: list[int]) -> int:
    return sum(costs.blocks[block].operators[ordinal].output_bytes for ordinal in ordinals)


def filled(problem: Problem, plan: Plan) -> Plan:
    """Return `plan` with what is left of host memory used: first for weights (read twice a step), then for states (once)."""
    spare = plan.allowed_bytes["host"] - plan.peak("host")
    group = buffer_groups(plan)["host_weights"]
    slot_bytes = group.total_bytes // group.count
    more = max(0, min(plan.num_blocks - plan.host_slots, spare // slot_bytes))
    plan = replace(plan, host_slots=plan.host_slots + more)
    # Immediate updates must be able to take a step back without a copy; states that live only in memory could not.
    if plan.update_policy == "deferred" and plan.host_slots >= plan.num_blocks:
        plan = _with_resident_states(plan, spare - more * slot_bytes)
    return with_footprint(plan, problem.costs_of(plan.micro_batch_sequences), problem.allowance)


def _with_resident_states(plan: Plan, spare_bytes: int) -> Plan:
    """Keep the states of as many units as fit in memory, shallow ones first: they are needed first in the next forward."""
    chosen: list[int] = []
    for unit, layout in enumerate(plan.units):
        needed = round_up(layout.num_elements * plan.planes.state_bytes_per_element, 4096)
        if needed <= spare_bytes:
            chosen.append(unit)
            spare_bytes -= needed
    return replace(plan, resident_states=tuple(chosen))


def fits(plan: Plan) -> bool:
    """Say whether the plan's peaks are within what each tier allows."""
    return _excess(plan) == 0


def nominal_ceilings(problem: Problem) -> Ceilings:
    """Return a machine to plan for where none was measured: modest figures in the usual proportions to one another.

    Only ratios matter to the choice. `headrace bench machine` measures the real ones.
    """
    cores = problem.allowance.cores
    gpu = problem.separate_device
    rate = 60e12 if gpu else 0.3e12 * cores
    return Ceilings.from_json(
        {
            "name": "nominal",
            "has_device": gpu,
            "device_memory_bytes": problem.allowance.device_bytes or 0,
            "host_memory_bytes": problem.allowance.host_bytes,
            "cores": cores,
            "flops_per_second": {"bfloat16": rate, "float16": rate, "float32": rate / 4},
            "host_to_device_bytes_per_second": 12e9,
            "device_to_host_bytes_per_second": 12e9,
            "both_ways_bytes_per_second": 20e9,
            "host_memory_bytes_per_second": 30e9,
            "update_bytes_per_second": 25e9,
            "update_bytes_per_second_per_core": 20e9,
            "drives": [
                {
                    "read_bytes_per_second": 3e9,
                    "write_bytes_per_second": 2.5e9,
                    "mixed_bytes_per_second": 4e9,
                    "capacity_bytes": 1 << 40,
                }
            ],
            "launch_seconds": 1e-4,
            "transfer_seconds": 1e-4,
            "commit_seconds": 5e-3,
            "slowdowns": {},
            "sources": {},
        }
    )


def _chunk_elements(problem: Problem, thrift: int) -> int:
    largest = max(layout.num_elements for layout in problem.layouts)
    return min(_CHUNK_CHOICES[thrift], round_up(largest, UNIT_ALIGNMENT))


def _micro_batches(workload: Workload) -> list[int]:
    """Return micro-batch sizes in rows: from what saturates compute down to one."""
    most = max(1, min(workload.sequences, _SATURATED_TOKENS // workload.sequence_length))
    sizes = [most]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes


def _loss_chunk_tokens(costs: ModelCosts, workload: Workload, lean: bool) -> int:
    """Return the largest tried chunk of positions whose logits take little beside what the head's gradient takes anyway."""
    samples = costs.epilogue_workspace_bytes
    allowed = samples[0][1] + _LOSS_CHUNK_BYTES // (4 if lean else 1)
    fitting = [tokens for tokens, num_bytes in samples if num_bytes <= allowed]
    return min(fitting[-1], costs.sequences * workload.sequence_length)


def _excess(plan: Plan) -> int:
    return sum(max(0, plan.peak(tier) - allowed) for tier, allowed in plan.allowed_bytes.items())


def _infeasible(plan: Plan) -> PlanInfeasible:
    tier = max(plan.allowed_bytes, key=lambda name: plan.peak(name) - plan.allowed_bytes[name])
    needed, allowed = plan.peak(tier), plan.allowed_bytes[tier]
    largest_first = sorted(plan.peak_bytes[tier].items(), key=lambda row: -row[1])
    rows = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest_first)
    largest = max(plan.units, key=lambda unit: unit.num_elements)
    option = "--device-memory" if tier == "device" else "--host-memory"
    return PlanInfeasible(
        f"{tier} memory: at least {format_bytes(needed)} are needed, {format_bytes(allowed)} are allowed ({rows}). "
        f"The largest unit is {largest.name} with {format_bytes(largest.num_elements * plan.planes.weight.bytes_per_element)} "
        f"of weights. Give {option} {_rounded_up(needed)} or more, or shorter sequences (now {plan.sequence_length})",
        tier=tier,
        needed_bytes=needed,
        allowed_bytes=allowed,
    )


def _rounded_up(num_bytes: int) -> str:
    return f"{round_up(num_bytes, 64 * MIB) // MIB}MiB"
