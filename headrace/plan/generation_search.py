"""The search for a generation's plan: rows of a seat, seats, and how much memory is left for weights.

Invariants: the chosen plan fits; with more memory it is no slower, because everything that fitted before is still tried.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.plan.caches import CACHE_GROUPS, COMPUTE, SSD, cache_choices, drive_bytes, whole_bytes
from headrace.plan.endurance import endurance
from headrace.plan.expert_search import rough_expert_seconds, ways_of_experts, with_cached_experts
from headrace.plan.experts import ExpertFigures
from headrace.plan.footprint import Allowance
from headrace.plan.generation import LEAST_PACKED_PASSES, GenerationPlan, PassForecast, generation_buffers
from headrace.plan.ledger import Snapshot
from headrace.plan.rates import Rates
from headrace.plan.results import Results
from headrace.plan.schedules.generate import build_pass
from headrace.plan.search import nominal_machine
from headrace.plan.simulate import simulate, step_seconds_of
from headrace.terms.ceilings import Ceilings
from headrace.terms.costs import GenerationCosts
from headrace.terms.errors import ConfigError, PlanInfeasible
from headrace.terms.forms import UnitFigures
from headrace.terms.program import Lane, Program
from headrace.terms.sizes import KEPT_FREE_BYTES, MIB, format_bytes

# Each seat is a thread with its own threads of the library that multiplies, as many as compute has.
MOST_SEATS = 64
MOST_ROWS = 4096
_SEAT_BYTES = MIB // 2
_SMALL_BYTES = 16 * MIB
_OPERATION_BYTES = 1200
_NO_PACKED = (
    "packed_products: asked for, but no plan with them fits: each block would have to stay in host memory, decoded and packed, "
    "with symmetric four-bit weights computed in bfloat16 on a processor with AVX2; give more --host-memory, or leave it out"
)
# The number of placements whose passes are simulated.
_MOST_SIMULATED = 24
# It is smaller where passes have many operations: so many pairs of a block and a seat.
_MOST_OPERATIONS = 20_000
# A seat's block has so many times the operations where the host attends.
_ATTENDING_OPERATIONS = 3
# Of so many, the fastest, it is tried whether weights should come further ahead.
_MOST_AHEAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationQuestion:
    """What is asked: `prompts` prompts of up to `prompt_length` tokens, and up to `new_tokens` of each.

    `rows` and `seats` are fixed where they are given, `most_rows` bounds rows. `ceilings` is the machine, None for a nominal
    one. `experts` are those of mixtures that may come by themselves. With `has_drives` keys and values may lie on the drives.
    `kept_copies` is as in the plan, and counted in `costs_of`. `prefill_chunks` are tried, 0 for whole prompts: `costs_of` is
    given rows, and a chunk that is not 0. `packed`: whether few rows are multiplied with packed weights; None: where that is
    faster. `attention`: which of attending on the host (true) and where blocks are computed are tried.
    """

    units: tuple[UnitFigures, ...]
    num_blocks: int
    compute_dtype: str
    separate_device: bool
    costs_of: Callable[..., GenerationCosts]
    prompts: int
    prompt_length: int
    new_tokens: int
    allowance: Allowance
    ceilings: Ceilings | None = None
    rows: int | None = None
    seats: int | None = None
    most_rows: int | None = None
    experts: ExpertFigures | None = None
    has_drives: bool = False
    kept_copies: int = 0
    prefill_chunks: tuple[int, ...] = (0,)
    packed: bool | None = False
    attention: tuple[bool, ...] = (False,)

    @property
    def machine(self) -> Ceilings:
        """The machine that is planned for."""
        allowance = self.allowance
        return self.ceilings or nominal_machine(
            allowance.cores, host_bytes=allowance.host_bytes, device_bytes=allowance.device_bytes
        )


def make_generation_plan(question: GenerationQuestion) -> GenerationPlan:
    """Return the fastest plan that fits.

    Raises:
        PlanInfeasible: nothing fits; the message says which tier is short, and what would help.
        ConfigError: packed products are asked for, and there is no plan with them.
    """
    question = _decoding_on(question, question.machine)
    fitting = [plan for plan in _placements(question) if _fits(plan)]
    if not fitting and question.packed:
        raise ConfigError(_NO_PACKED)
    if not fitting:
        raise _infeasible(question)
    rates = Rates(question.machine, question.compute_dtype, question.allowance.cores, None)
    fitting.sort(key=lambda plan: _rough_seconds(plan, rates))
    # The places of attention are tried apart, so that no plan is slower because both may be chosen.
    groups = [[plan for plan in fitting if plan.caches.attends is attends] for attends in (False, True)]
    found = [_fastest(group[:_MOST_SIMULATED], rates) for group in groups if group]
    return with_forecast(min(found, key=lambda timed: timed[0])[1], question.machine)


def _fastest(plans: Sequence[GenerationPlan], rates: Rates) -> tuple[float, GenerationPlan]:
    """Return the fastest of `plans`, or of what brings weights further ahead than the best of them, and its seconds."""
    timed, operations = list[tuple[float, int, GenerationPlan]](), 0
    for index, plan in enumerate(plans):
        timed.append((seconds_of_all_tokens(plan, rates), index, plan))
        operations += plan.num_blocks * plan.seats * (_ATTENDING_OPERATIONS if plan.caches.attends else 1)
        if operations > _MOST_OPERATIONS:
            break
    best = [plan for *_, plan in sorted(timed)[:_MOST_AHEAD]]
    timed += [(seconds_of_all_tokens(plan, rates), index, plan) for index, plan in enumerate(_further_ahead(best), len(timed))]
    return min(timed)[0], min(timed)[2]


def _further_ahead(plans: Sequence[GenerationPlan]) -> Iterator[GenerationPlan]:
    """Yield plans that bring weights further ahead: while blocks that stay are computed, the next one that does not comes.

    With H of L blocks in memory, every (L / (L - H + 1))th one does not stay. Bringing it earlier takes away from others, so it
    comes a little more often: where little is computed meanwhile that is slower.
    """
    for plan in plans:
        blocks, apart = plan.num_blocks, plan.separate_device or plan.makes_slots
        tiers = [plan.host_slots, *([plan.device_slots] if apart else [])]
        reaches = {-(-blocks // (blocks - slots + 1)) - less for slots in tiers if slots < blocks for less in (0, 1)}
        for reach in sorted(reaches):
            if plan.prefetch < reach < min(tiers):
                yield replace(plan, prefetch=reach)


def _decoding_on(question: GenerationQuestion, machine: Ceilings) -> GenerationQuestion:
    """Return the question with what decoding takes on a machine."""

    def figured(units: Sequence[UnitFigures]) -> tuple[UnitFigures, ...]:
        return tuple(replace(unit, making_like=machine.making_like(unit.decodes)) for unit in units)

    experts = question.experts
    if experts is not None:
        like = machine.making_like(experts.decodes)
        experts = replace(experts, units=figured(experts.units), making_like=like)
    return replace(question, units=figured(question.units), experts=experts)


def with_forecast(plan: GenerationPlan, ceilings: Ceilings) -> GenerationPlan:
    """Return `plan` with the forecast of a pass on a machine."""
    timeline = simulate(_passes(plan), ceilings, compute_dtype=plan.compute_dtype, compute_threads=plan.compute_threads)
    rates = Rates(ceilings, plan.compute_dtype, plan.compute_threads, None)
    first = plan.costs.first_passes * step_seconds_of(_passes(plan, first=True), rates)
    # What stays in memory is read once, in the first pass of all.
    cold_program, _ = build_pass(plan, plan.seats, Snapshot(), first=True)
    cold = max(
        first, step_seconds_of([cold_program] * 3, rates) + (plan.costs.first_passes - 1) * first / plan.costs.first_passes
    )
    whole = _rounds(plan) * (first + (plan.new_tokens - 1) * timeline.step_seconds) + cold - first
    read = sum(timed.op.bytes for timed in timeline.step_ops() if timed.op.lane is Lane.SSD_READ)
    found = PassForecast(
        pass_seconds=timeline.step_seconds,
        first_pass_seconds=cold,
        tokens_per_second=plan.prompts * plan.new_tokens / whole,
        limiting=timeline.bottleneck.row.words,
        read_bytes=read,
        written_bytes=(written := _written_bytes(plan)),
        wear=_wear(written, ceilings),
        machine=ceilings.called,
    )
    return replace(plan, forecast=found)


def _placements(question: GenerationQuestion) -> Iterator[GenerationPlan]:
    """Yield plans with as many blocks in memory as fit, for each number of rows and seats; some do not fit."""
    rates = Rates(question.machine, question.compute_dtype, question.allowance.cores, None)
    all_rows = _choices(question.prompts, question.rows, question.most_rows or MOST_ROWS)
    for rows, chunk in itertools.product(all_rows, question.prefill_chunks):
        costs = question.costs_of(rows, chunk) if chunk else question.costs_of(rows)
        for seats in _choices(-(-question.prompts // rows), question.seats, MOST_SEATS):
            homes = cache_choices(
                () if question.kept_copies else costs.tiered,
                separate_device=question.separate_device,
                has_drives=question.has_drives,
                num_blocks=question.num_blocks,
                attention=question.attention if costs.attends else (False,),
            )
            for prefetch, caches in itertools.product((2, 1), homes):
                least = GenerationPlan(
                    compute_dtype=question.compute_dtype,
                    separate_device=question.separate_device,
                    units=question.units,
                    num_blocks=question.num_blocks,
                    rows=rows,
                    seats=seats,
                    prompts=question.prompts,
                    prompt_length=question.prompt_length,
                    new_tokens=question.new_tokens,
                    kept_copies=question.kept_copies,
                    host_slots=min(prefetch + 1, question.num_blocks),
                    device_slots=min(prefetch + 1, question.num_blocks),
                    prefetch=min(prefetch, question.num_blocks - 1),
                    compute_threads=question.allowance.cores,
                    costs=costs,
                    caches=caches,
                )
                for way in ways_of_experts(least, None if caches.attends else question.experts, rates):
                    for plan in _filled(way, question.allowance):
                        if not question.packed:
                            yield plan
                        yield from _packed(plan, question)


def _packed(plan: GenerationPlan, question: GenerationQuestion) -> Iterator[GenerationPlan]:
    """Yield `plan` with packed weights, if it can have them, and they are asked for or have passes enough to pay."""
    pays = _rounds(plan) * (plan.new_tokens - 1) >= LEAST_PACKED_PASSES
    packed = plan.with_packed() if question.packed or (question.packed is None and pays) else None
    if packed is not None and (question.packed or plan.rows <= packed.packed_rows):
        yield with_peaks(packed, question.allowance)


def _choices(most: int, given: int | None, limit: int) -> Sequence[int]:
    """Return the numbers to try: powers of two up to what there is, and that number itself."""
    if given is not None:
        return (max(1, min(given, most)),)
    top = min(most, limit)
    return sorted({*(1 << power for power in range(top.bit_length()) if 1 << power <= top), top})


def _filled(plan: GenerationPlan, allowance: Allowance) -> Iterator[GenerationPlan]:
    """Yield `plan` with more slots, as many as the budgets hold: first for blocks as compute reads them, or first as stored."""
    plan = with_peaks(plan, allowance)
    if not _fits(plan):
        yield plan
        return
    orders: list[tuple[str, ...]] = [("host_slots",)]
    if plan.separate_device or plan.makes_slots:
        orders = [("device_slots", "host_slots"), ("host_slots", "device_slots")]
    for order in orders:
        filled = plan
        for name in order:
            if filled.experts is not None and name == "host_slots" and filled.device_slots == plan.num_blocks:
                continue  # what every token reads is where compute is, so host memory is for experts
            on_device = name == "device_slots"
            tier = "device" if on_device and plan.separate_device else "host"
            if (allowed := plan.results.allowed_bytes.get(tier)) is None:
                continue
            more = (allowed - filled.peak(tier)) // filled.largest(filled.slot_bytes if on_device else filled.stored_bytes)
            slots = min(plan.num_blocks, getattr(filled, name) + more)
            filled = with_peaks(replace(filled, **{name: slots}), allowance)
        if filled.experts is not None and allowance.host_bytes is not None:
            filled = with_peaks(with_cached_experts(filled, allowance.host_bytes), allowance)
        yield filled


def with_peaks(plan: GenerationPlan, allowance: Allowance) -> GenerationPlan:
    """Return `plan` with its peak bytes per tier and purpose filled in."""
    costs, threads = plan.costs, plan.seats
    rows: dict[str, dict[str, int]] = {"host": {"runtime": allowance.runtime_bytes}}
    if plan.separate_device:
        rows = {"device": {}, **rows}
    for name, (tier, count, size) in generation_buffers(plan).items():
        purpose = "cache" if name.startswith(CACHE_GROUPS) else "weights"
        rows[tier][purpose] = rows[tier].get(purpose, 0) + count * size
    compute = rows["device" if plan.separate_device else "host"]
    stays = [block for block in range(1, plan.num_blocks + 1) if plan.caches.home(block) == COMPUTE]
    kept = sum(whole_bytes(costs, plan.new_tokens, block) for block in stays)
    compute["cache"] = compute.get("cache", 0) + plan.seats * kept
    passing = max(costs.first.call_bytes + 2 * costs.first.hidden_bytes, costs.next.call_bytes + 2 * costs.next.hidden_bytes)
    compute["activations"] = plan.seats * passing
    # A block's cache is copied when it grows, and both exist for a moment. A cache that is lent memory exists once.
    last = (
        whole_bytes(costs, plan.new_tokens, block) * (2 if plan.caches.home(block) == COMPUTE else 1)
        for block in range(1, plan.num_blocks + 1)
    )
    before = costs.first.call_bytes + 3 * costs.first.hidden_bytes
    compute["workspace"] = max(costs.first.workspace_bytes, costs.next.workspace_bytes + max(last), costs.head_bytes, before)
    making = max(unit.making_bytes for unit in plan.units)
    if plan.experts is not None:
        making = max(making, plan.experts.figures.making_bytes)
        compute["waiting for experts"] = plan.seats * plan.experts.waiting_bytes(
            plan.rows * costs.first_tokens, costs.first.hidden_bytes
        )
    if making:
        compute["decoding"] = making
    if plan.packed_rows:
        blocks = plan.units[1 : plan.num_blocks + 1]
        compute["packed"] = sum(unit.packed_bytes for unit in blocks) + max(unit.packing_bytes for unit in blocks)
    if plan.adapter_bytes:
        compute["adapters"] = plan.adapter_bytes
    on_cpu = not allowance.device_overhead_bytes
    rows["host"]["seats"] = threads * _SEAT_BYTES
    rows["host"]["libraries"] = _SMALL_BYTES
    rounds = plan.experts.all_rounds if plan.experts is not None else 0
    each = 2 * (_ATTENDING_OPERATIONS if plan.caches.attends else 1)
    rows["host"]["program"] = 4 * (plan.num_blocks * (each * plan.seats + 3) + 4 * rounds) * _OPERATION_BYTES
    if on_cpu:
        rows["host"]["freed blocks"] = _SMALL_BYTES + min(compute["workspace"] // 2, KEPT_FREE_BYTES)
    else:
        rows["device"]["libraries"] = allowance.device_overhead_bytes + sum(
            compute[name] // 4 for name in ("cache", "activations", "workspace")
        )
    allowed = {"host": allowance.host_bytes}
    if plan.separate_device and allowance.device_bytes is not None:
        allowed["device"] = allowance.device_bytes
    if on_drives := sum(drive_bytes(plan.caches, costs, plan.new_tokens, block) for block in plan.caches.blocks(SSD)):
        rows["ssd"] = {"cache": plan.seats * on_drives}
        if allowance.ssd_bytes is not None:
            allowed["ssd"] = allowance.ssd_bytes
    return replace(plan, results=Results(peak_bytes=rows, allowed_bytes=allowed, notes=plan.results.notes))


def _fits(plan: GenerationPlan) -> bool:
    return all(plan.peak(tier) <= allowed for tier, allowed in plan.results.allowed_bytes.items())


def _passes(plan: GenerationPlan, *, first: bool = False) -> list[Program]:
    """Return a cold pass and enough passes after it to see the steady state."""
    programs, before = [], Snapshot()
    for number in range(3):
        program, before = build_pass(plan, plan.seats, before, first=first and number == 2)
        programs.append(program)
    return programs


def _rounds(plan: GenerationPlan) -> int:
    return -(-plan.prompts // (plan.rows * plan.seats))


def seconds_of_all_tokens(plan: GenerationPlan, rates: Rates) -> float:
    """Return the seconds that the passes of all tokens of all prompts take, batch after batch, per token."""
    first, following = step_seconds_of(_passes(plan, first=True), rates), step_seconds_of(_passes(plan), rates)
    return _rounds(plan) * (plan.costs.first_passes * first + (plan.new_tokens - 1) * following) / plan.new_tokens


def _written_bytes(plan: GenerationPlan) -> int:
    """Return the bytes of caches that are written to the drives for all prompts."""
    blocks = plan.caches.blocks(SSD)
    return _rounds(plan) * plan.seats * sum(drive_bytes(plan.caches, plan.costs, plan.new_tokens, block) for block in blocks)


def _wear(written_bytes: int, ceilings: Ceilings) -> str:
    if not (written_bytes and ceilings.drives):
        return ""
    found = endurance(ceilings.drives, written_bytes, num_steps=1, step_seconds=0.0)
    return f", {found.share_of_rating:.2g} of the rated endurance of SSD {found.drive}"


def _rough_seconds(plan: GenerationPlan, rates: Rates) -> float:
    """Return the seconds per token of all passes, by the lane that alone takes longest."""
    blocks = range(1, plan.num_blocks + 1)
    held = max(plan.host_slots, plan.device_slots if plan.makes_slots or plan.separate_device else 0)
    missing = (plan.num_blocks - held + 1) / plan.num_blocks if held < plan.num_blocks else 0.0
    read = missing * sum(plan.stored_bytes(unit) for unit in blocks) / rates.bytes_per_second[Lane.SSD_READ]
    sent = 0.0
    if plan.separate_device:
        part = max(0, plan.num_blocks - plan.device_slots + 1) / plan.num_blocks
        sent = part * sum(plan.stored_bytes(unit) for unit in blocks) / rates.bytes_per_second[Lane.HOST_TO_DEVICE]
    if plan.makes_slots:
        left = (plan.num_blocks - plan.device_slots + 1) / plan.num_blocks if plan.device_slots < plan.num_blocks else 0.0
        made = sum(max(plan.slot_bytes(unit) + plan.stored_bytes(unit), plan.units[unit].making_like) for unit in blocks)
        sent = max(sent, left * made / rates.bytes_per_second[Lane.MAKE])
    caches = {block: plan.seats * whole_bytes(plan.costs, plan.new_tokens // 2, block) for block in blocks}
    read += sum(caches[block] for block in plan.caches.blocks(SSD)) / rates.bytes_per_second[Lane.SSD_READ]
    # Keys and values of new tokens go to the drives, and to the host, spread over all tokens.
    new = {block: plan.seats * whole_bytes(plan.costs, plan.new_tokens, block) / plan.new_tokens for block in blocks}
    read += sum(new[block] for block in plan.caches.blocks(SSD)) / rates.bytes_per_second[Lane.SSD_WRITE]
    away = sum(caches[block] for block in blocks if plan.caches.home(block) != COMPUTE)
    attending = away / rates.bytes_per_second[Lane.ATTENTION] if plan.caches.attends and plan.separate_device else 0.0
    if plan.separate_device and not attending:
        sent += away / rates.bytes_per_second[Lane.HOST_TO_DEVICE]
    touched = (
        sum(plan.block_bytes(block, plan.rows) for block in blocks)
        + plan.multiplied_bytes(plan.head_bytes, plan.rows)
        + 3 * (sum(caches.values()) - (away if attending else 0)) / plan.seats
    )
    flops = sum(plan.costs.next.flops) + plan.costs.head_flops
    computing = plan.seats * rates.compute_seconds(flops, touched, sum(plan.costs.next.calls))
    return _rounds(plan) * (max(read, sent, computing, attending) + rough_expert_seconds(plan, rates))


def _infeasible(question: GenerationQuestion) -> PlanInfeasible:
    few = replace(question, rows=question.rows or 1, seats=question.seats or 1)
    placements = [
        plan for plan in _placements(few) if plan.peak("ssd") <= plan.results.allowed_bytes.get("ssd", plan.peak("ssd"))
    ]
    one = min(placements, key=lambda plan: (plan.peak("host"), plan.peak("device")))
    tier = next(tier for tier, allowed in one.results.allowed_bytes.items() if one.peak(tier) > allowed)
    needed, allowed = one.peak(tier), one.results.allowed_bytes[tier]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in one.results.peak_bytes[tier].items() if size)
    advice = "fewer new tokens or shorter prompts take less" if question.rows is None else "fewer rows take less"
    return PlanInfeasible(
        f"{tier} memory: one seat of {one.rows} row{'s' if one.rows > 1 else ''} takes {format_bytes(needed)} ({parts}), "
        f"allowed are {format_bytes(allowed)}; {advice}, or give --{tier}-memory {format_bytes(needed)}",
        tier=tier,
        needed_bytes=needed,
        allowed_bytes=allowed,
    )
