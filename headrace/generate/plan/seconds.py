"""The seconds that a generation's plan takes, simulated pass by pass or roughly by its longest lane, and what it writes."""

from dataclasses import replace

from headrace.generate.plan.cache_plan import COMPUTE, SSD, moved_bytes, touched_bytes
from headrace.generate.plan.expert_search import rough_expert_seconds
from headrace.generate.plan.pass_forecast import PassForecast
from headrace.generate.plan.plan import GenerationPlan
from headrace.generate.plan.schedule import build_pass
from headrace.plan.clock.endurance import endurance
from headrace.plan.clock.rates import Rates
from headrace.plan.clock.simulate import simulate, step_seconds_of
from headrace.plan.schedules.ledger import Snapshot
from headrace.terms.lanes import Lane, words_of_lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Program


def with_forecast(plan: GenerationPlan, ceilings: Ceilings) -> GenerationPlan:
    """Return `plan` with the forecast of a pass on a machine."""
    of_prompts, of_tokens = passes_of(plan)
    timeline = simulate(of_tokens, ceilings, compute_dtype=plan.compute_dtype, compute_threads=plan.compute_threads)
    rates = Rates(ceilings, plan.compute_dtype, plan.compute_threads, None)
    first = plan.costs.first_passes * step_seconds_of(of_prompts, rates)
    # What stays in memory is read once, in the first pass of all.
    cold_program, _ = build_pass(plan, plan.seats, Snapshot(), first=True)
    cold = max(
        first, step_seconds_of([cold_program] * 3, rates) + (plan.costs.first_passes - 1) * first / plan.costs.first_passes
    )
    whole = rounds_of(plan) * (first + (plan.new_tokens - 1) * timeline.step_seconds)
    read = sum(timed.op.bytes for timed in timeline.step_ops() if timed.op.lane is Lane.SSD_READ)
    found = PassForecast(
        pass_seconds=timeline.step_seconds,
        first_pass_seconds=cold,
        cold_seconds=cold - first,
        tokens_per_second=plan.prompts * plan.new_tokens / whole,
        limiting=words_of_lane(timeline.bottleneck, has_device=ceilings.has_device),
        read_bytes=read,
        written_bytes=(written := _written_bytes(plan)),
        wear=_wear(written, ceilings),
        machine=ceilings.called,
    )
    return replace(plan, forecast=found)


def passes_of(plan: GenerationPlan) -> tuple[list[Program], list[Program]]:
    """Return a cold pass and enough passes after it to see the steady state: to a pass over prompts, and to one of tokens."""
    cold, before = build_pass(plan, plan.seats, Snapshot())
    second, before = build_pass(plan, plan.seats, before)
    first, following = (build_pass(plan, plan.seats, before, first=of_prompts)[0] for of_prompts in (True, False))
    return [cold, second, first], [cold, second, following]


def rounds_of(plan: GenerationPlan) -> int:
    """Return how often the seats are filled until all prompts are answered."""
    return -(-plan.micro_batches // plan.seats)


def seconds_of_all_tokens(plan: GenerationPlan, rates: Rates) -> float:
    """Return the seconds that the passes of all tokens of all prompts take, batch after batch, per token."""
    first, following = (step_seconds_of(programs, rates) for programs in passes_of(plan))
    return rounds_of(plan) * (plan.costs.first_passes * first + (plan.new_tokens - 1) * following) / plan.new_tokens


def _written_bytes(plan: GenerationPlan) -> int:
    """Return the bytes of caches that are written to the drives for all prompts."""
    page = plan.caches.page_bytes
    sizes = [moved_bytes(plan.caches, plan.costs, plan.new_tokens, block) for block in plan.caches.blocks(SSD)]
    return rounds_of(plan) * plan.seats * sum(size // page * page for size in sizes)


def _wear(written_bytes: int, ceilings: Ceilings) -> str:
    if not (written_bytes and ceilings.drives):
        return ""
    found = endurance(ceilings.drives, written_bytes, num_steps=1, step_seconds=0.0)
    return f", {found.share_of_rating:.2g} of the rated endurance of SSD {found.drive}"


def rough_seconds(plan: GenerationPlan, rates: Rates) -> float:
    """Return the seconds per token of all passes, by the lane that alone takes longest."""
    costs, sizes, homes = plan.costs, plan.weight_sizes, plan.caches.homes or (COMPUTE,) * plan.num_blocks
    held = max(plan.host_slots, plan.device_slots if plan.makes_slots or plan.separate_device else 0)
    missing = (plan.num_blocks - held + 1) / plan.num_blocks if held < plan.num_blocks else 0.0
    read = missing * sizes.stored_of_blocks / rates.bytes_per_second[Lane.SSD_READ]
    sent = 0.0
    if plan.separate_device:
        part = max(0, plan.num_blocks - plan.device_slots + 1) / plan.num_blocks
        sent = part * sizes.stored_of_blocks / rates.bytes_per_second[Lane.HOST_TO_DEVICE]
    if plan.makes_slots:
        left = (plan.num_blocks - plan.device_slots + 1) / plan.num_blocks if plan.device_slots < plan.num_blocks else 0.0
        made = sum(
            max(plan.slot_bytes(unit) + plan.stored_bytes(unit), plan.units[unit].making_like)
            for unit in range(1, plan.num_blocks + 1)
        )
        sent = max(sent, left * made / rates.bytes_per_second[Lane.MAKE])
    each = [*zip(costs.cache_bytes, costs.cache_token_bytes, strict=True)]
    caches = [plan.seats * (prompt + plan.new_tokens // 2 * token) for prompt, token in each]
    # Keys and values of new tokens go to the drives, and to the host, spread over all tokens.
    new = [plan.seats * (prompt + plan.new_tokens * token) / plan.new_tokens for prompt, token in each]
    read += sum(size for size, home in zip(caches, homes, strict=True) if home == SSD) / rates.bytes_per_second[Lane.SSD_READ]
    read += sum(size for size, home in zip(new, homes, strict=True) if home == SSD) / rates.bytes_per_second[Lane.SSD_WRITE]
    away = sum(size for size, home in zip(caches, homes, strict=True) if home != COMPUTE)
    attending = away / rates.bytes_per_second[Lane.ATTENTION] if plan.caches.attends and plan.separate_device else 0.0
    if plan.separate_device and not attending:
        sent += away / rates.bytes_per_second[Lane.HOST_TO_DEVICE]
    touched = (
        plan.bytes_of_blocks(plan.rows)
        + plan.multiplied_bytes(plan.head_bytes, plan.rows)
        + sum(costs.next.waited_bytes)
        + (sum(touched_bytes(costs, size, block) for block, size in enumerate(caches, 1)) - (3 * away if attending else 0))
        / plan.seats
    )
    flops = sum(costs.next.flops) + costs.head_flops
    computing = plan.seats * rates.compute_seconds(flops, touched, sum(costs.next.calls))
    return rounds_of(plan) * (max(read, sent, computing, attending) + rough_expert_seconds(plan, rates))
