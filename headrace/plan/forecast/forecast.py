"""What a plan will do on a machine: seconds per step, SSD traffic, and what limits it, from the simulated interpreter.

The simulated programs are those that the engine will run, except that very large steps are cut more coarsely (`coarse`). That
makes a forecast too fast. With immediate updates it is 6 % at the default number of operations, and 15 % at a quarter of it.
With deferred updates it is 2.5 % and 4 % (48 blocks, two machines, 4 to 64 micro-batches). With the small chunks of the
tightest plans it is a fifth.

Invariant: results follow from plan and ceilings alone; `lower_bound_seconds <= step_seconds`. No clock, no files, no torch.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256

from headrace.plan.clock.bound import least_seconds
from headrace.plan.clock.rates import Rates
from headrace.plan.clock.simulate import Timeline, simulate, step_seconds_of
from headrace.plan.forecast.coarse import coarsened, launch_flops
from headrace.plan.schedules.forward import build_forward
from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.ranks import of_rank, ranks_on, sharers_on
from headrace.plan.schedules.stage import build_alone
from headrace.plan.schedules.train import build_program, build_tail, redo
from headrace.plan.value.block_tables import read_table_bytes, with_waits, written_table_bytes
from headrace.plan.value.plan import Plan
from headrace.plan.value.results import Results
from headrace.terms.costs import ATTENTION
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Program
from headrace.terms.rule_figures import RuleFigures

# Operations for a search that compares many plans: coarse, and equally so for all of them.
SEARCH_OPERATIONS = 800
# At most so many programs are built until one repeats; some placements take a few steps to settle, a few never do.
_MOST_PROGRAMS = 12
# The most rounds of a block's experts in a forecast.
_SIMULATED_ROUNDS = 4
# Operations of one program above which work is cut more coarsely.
_MOST_OPERATIONS = 6000


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A step in the steady state; of a stage, with the time in which it waits for others like it. Bytes are per step, over all
    SSD directories. Operations are those of matrix products; `timeline` also counts everything else that takes compute's time,
    as operations that would take as long.

    `bottleneck` is the lane that limits the step, `explanation` the same in words. `utilisation` is the share of the step
    for which each lane is busy. `work` has the seconds that each lane's work takes alone. They leave out the time that fresh
    pages cost compute, because a run with more memory for itself has none.
    """

    step_seconds: float
    tokens_per_second: float
    flops_per_step: float
    ssd_bytes_read_per_step: int
    ssd_bytes_written_per_step: int
    bottleneck: Lane
    explanation: str
    utilisation: dict[Lane, float]
    work: dict[Lane, float]
    timeline: Timeline = field(repr=False)

    @cached_property
    def lower_bound_seconds(self) -> float:
        """Seconds below which no machine with these ceilings can do the step's work, however well it overlaps; the rest of
        `step_seconds` is waiting. It takes a few milliseconds to find, and a search does not need it.
        """
        return least_seconds(self.work, self.timeline.rates.speeds)


def forecast(plan: Plan, ceilings: Ceilings, *, most_operations: int = _MOST_OPERATIONS) -> Forecast:
    """Simulate consecutive steps of `plan` on a machine with `ceilings`.

    A step of more than about `most_operations` is cut more coarsely. The default takes 0.4 s; a search that compares many
    plans may ask for fewer: 1500 take 0.1 s, however large the model is.

    Raises:
        ConfigError: the profile has no matrix rate for the plan's compute dtype.
    """
    return _forecast_of(plan, ceilings, _simulated(*_asked(plan, ceilings, most_operations)))


def _forecast_of(plan: Plan, ceilings: Ceilings, simulated: "_Simulated") -> Forecast:
    kept_share = _kept_share(plan, ceilings)
    step_seconds, timeline, written_bytes = simulated
    return Forecast(
        step_seconds=step_seconds,
        tokens_per_second=plan.batch.tokens_per_step / step_seconds,
        flops_per_step=_flops_per_step(_with_rows(_with_samples(plan))),
        ssd_bytes_read_per_step=timeline.lanes[Lane.SSD_READ].bytes
        + plan.read_embedding_bytes
        + read_table_bytes(plan)
        + _read_head_bytes(plan),
        ssd_bytes_written_per_step=written_bytes + plan.written_embedding_bytes + written_table_bytes(plan),
        bottleneck=timeline.bottleneck,
        explanation=timeline.explanation,
        utilisation={lane: use.utilisation for lane, use in timeline.lanes.items()},
        work={lane: use.alone_seconds * (kept_share if lane is Lane.COMPUTE else 1) for lane, use in timeline.lanes.items()},
        timeline=timeline,
    )


def _read_head_bytes(plan: Plan) -> int:
    return plan.ranged_head_bytes if plan.visiting_head == "ssd" else 0


class StepSeconds:
    """Seconds of a step for many plans on one machine, exactly as `forecast` gives them.

    Plans that lead to the same operations are simulated once. In a search these are about half. When cut coarsely, many kinds
    of buffers are equal, and a plan that was tried comes back as the one to improve. Only seconds are remembered, no timelines.
    """

    def __init__(self, machine: Ceilings) -> None:
        self.machine = machine
        self._known: dict[bytes, float] = {}
        self._newest: tuple[bytes, _Simulated] | None = None

    def __call__(self, plan: Plan, most_operations: int = _MOST_OPERATIONS) -> float:
        """Return the seconds of a step of `plan`, which is cut as `forecast` cuts it."""
        asked = _asked(plan, self.machine, most_operations)
        key = _digest(asked)
        if key not in self._known:
            self._known[key] = _simulated_seconds(*asked)
        return self._known[key]

    def forecast(self, plan: Plan) -> Forecast:
        """Return the forecast of `plan`. The newest one is kept, because it is reported after the choice of a plan."""
        asked = _asked(plan, self.machine, _MOST_OPERATIONS)
        key = _digest(asked)
        if self._newest is None or self._newest[0] != key:
            self._newest = key, _simulated(*asked)
            self._known[key] = self._newest[1][0]
        return _forecast_of(plan, self.machine, self._newest[1])


_Asked = tuple[Plan, Ceilings]
_Simulated = tuple[float, Timeline, int]


def _asked(plan: Plan, ceilings: Ceilings, most_operations: int) -> _Asked:
    """Return everything that goes into the simulation of `plan`."""
    return simulated_plan(plan, ceilings, most_operations), under(plan, ceilings)


def _digest(asked: _Asked) -> bytes:
    """Return a short digest that is equal for equal simulations: representations of numbers are exact."""
    return sha256(repr(asked).encode()).digest()


def redo_seconds(plan: Plan, ceilings: Ceilings) -> float:
    """Return the seconds of doing all updates of a step again from the held gradients, with nothing else under way."""
    ceilings = under(plan, ceilings)
    coarse = coarsened(plan, ceilings, 2 * SEARCH_OPERATIONS)
    tail, _ = build_tail(coarse, redo(coarse), shared=ranks_on(ceilings) > 1)
    programs = [of_rank(tail, ranks_on(ceilings), sharers_on(ceilings))] * 3
    timeline = simulate(programs, ceilings, compute_dtype=plan.compute_dtype, update_threads=plan.updates.threads)
    return timeline.step_seconds


def scoring_seconds(plan: Plan, ceilings: Ceilings) -> float:
    """Return the seconds of one pass that evaluates as many rows as a step has, one pass after the other.

    A pass uses the buffers of a step's forward, so it takes no memory that the plan does not have.
    """
    simulated, machine = _asked(plan, ceilings, _MOST_OPERATIONS)
    programs: list[Program] = []
    before = Snapshot()
    while len(programs) < _MOST_PROGRAMS and (len(programs) < 2 or programs[-1] != programs[-2]):
        shared = ranks_on(ceilings) > 1
        program, before = build_forward(simulated, simulated.batch.num_micro_batches, before, shared=shared)
        programs.append(of_rank(program, ranks_on(ceilings), sharers_on(ceilings)))
    timeline = simulate(
        [*programs, programs[-1]], machine, compute_dtype=plan.compute_dtype, compute_threads=plan.compute_threads
    )
    return timeline.step_seconds


def core_update_bytes_per_second(ceilings: Ceilings, rule: RuleFigures) -> float:
    """Return the bytes per second with which a core updates by `rule`."""
    return ceilings.update_bytes_per_second_per_core * rule.core_rate


def under(plan: Plan, ceilings: Ceilings) -> Ceilings:
    """Return the ceilings of the machine under `plan`: its cores as they are shared out, its rule, its memory."""
    kept_share = _kept_share(plan, ceilings)
    return replace(
        ceilings,
        slowdowns=_apart(ceilings.slowdowns) if _has_partition(plan, ceilings) else ceilings.slowdowns,
        flops_per_second={dtype: rate * kept_share for dtype, rate in ceilings.flops_per_second.items()},
        update_bytes_per_second_per_core=core_update_bytes_per_second(ceilings, plan.rule),
    )


def _has_partition(plan: Plan, ceilings: Ceilings) -> bool:
    """Return whether compute and updates have cores of their own on a machine where the CPU computes."""
    return not ceilings.has_device and plan.compute_threads + plan.updates.threads <= ceilings.cores


def _apart(slowdowns: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return slowdowns without those of compute and updates by one another, which were measured on shared cores."""
    shared = (Lane.COMPUTE, Lane.UPDATE)
    return {
        lane: {other: kept for other, kept in others.items() if not (lane in shared and other in shared)}
        for lane, others in slowdowns.items()
    }


def _kept_share(plan: Plan, ceilings: Ceilings) -> float:
    """Return the share of its rate that compute keeps: on a CPU, freed memory that is given back returns as fresh pages.

    If a step turns out to leave room to keep freed memory (`machine.host_memory.HeapGuard`), it is faster than this.
    """
    return 1.0 if ceilings.has_device or plan.freed_memory == "kept" else ceilings.fresh_pages_share


def _flops_per_step(plan: Plan) -> float:
    """Return the operations of a step: forward, recompute as far as nothing is kept, and backward; beside frozen weights
    backward makes only gradients of inputs.
    """
    each = zip(plan.units, plan.results.forward_flops, strict=False)
    blocks = sum((3 if unit.is_beside else 4) * flops for unit, flops in each) - sum(plan.results.spared_flops)
    return plan.batch.num_micro_batches * (blocks + (2 + plan.batch.head_passes) * plan.results.epilogue_flops)


def _with_rows(plan: Plan) -> Plan:
    """Return a plan whose micro-batches have the operations of the step's rows: the last one has fewer, without padding."""
    rows = plan.batch.micro_batch_sequences * plan.batch.num_micro_batches
    share = plan.batch.tokens_per_step / (plan.batch.sequence_length * rows)
    if share == 1:
        return plan
    return plan.with_results(
        forward_flops=tuple(flops * share for flops in plan.results.forward_flops),
        spared_flops=tuple(flops * share for flops in plan.results.spared_flops),
        epilogue_flops=plan.results.epilogue_flops * share,
    )


def _with_samples(plan: Plan) -> Plan:
    """Return a plan whose attention has the operations of its samples, where these run by themselves."""
    results = plan.results
    if results.groups is None:
        return plan
    attention = [results.groups.attention * flops for flops in results.attention_flops]
    spared = (0.0, *map(operator.sub, results.attention_flops, attention), 0.0)
    return plan.with_results(
        forward_flops=tuple(map(operator.sub, results.forward_flops, spared)), attention_flops=tuple(attention)
    )


def _with_calls(plan: Plan, ceilings: Ceilings) -> Plan:
    """Return a plan whose blocks have the launches of all groups of samples, as operations that take as long."""
    results = plan.results
    if results.groups is None:
        return plan
    more = launch_flops(plan, ceilings, results.groups.calls - 1)
    blocks = (flops + more for flops in results.forward_flops[1 : plan.num_blocks + 1])
    return plan.with_results(forward_flops=(results.forward_flops[0], *blocks, *results.forward_flops[plan.num_blocks + 1 :]))


def _with_elementwise(plan: Plan, ceilings: Ceilings) -> Plan:
    """Return a plan in which a model's work besides matrix products is counted as operations that take as many seconds.

    A block's share depends on the size of its hidden states, and on how much slower attention is. Compute waits for rows of an
    embedding that are read, and for ranges of a head. The head's depends on logits
    and, for each chunk of the loss, on parameters: `epilogue_flops` are two for each parameter and token.
    """
    if not plan.results.forward_flops:
        return plan
    rate = ceilings.matrix_flops_per_second(plan.compute_dtype)
    tokens = plan.micro_batch_tokens
    width = plan.batch.hidden_size_bytes / plan.planes.weight.bytes_per_element
    block = ceilings.hidden_seconds * tokens * width * rate
    rows = plan.embedding.seconds(tokens, ceilings.ssd_read_bytes_per_second) if plan.embedding else 0.0
    head_parameters = plan.results.epilogue_flops / (2 * tokens)
    chunks = -(-tokens // plan.batch.loss_chunk_tokens)
    head = (ceilings.logit_seconds * tokens / width + ceilings.head_seconds * chunks) * head_parameters * rate
    wait = _range_seconds(plan, ceilings, (3 * plan.results.epilogue_flops + head) / rate)
    slower = 1 / ceilings.attention_share - 1
    attention = [slower * flops for flops in plan.results.attention_flops] or [0.0] * plan.num_blocks
    # Forward and backward together count a block's forward four times, and the head's three times.
    waiting = with_waits(plan, ceilings)
    blocks = (flops + block / 4 for flops in waiting.results.forward_flops[1 : plan.num_blocks + 1])
    return plan.with_results(
        forward_flops=(
            plan.results.forward_flops[0] + rows * rate,
            *(flops + more for flops, more in zip(blocks, attention, strict=True)),
            *plan.results.forward_flops[plan.num_blocks + 1 :],
        ),
        spared_flops=tuple(
            spared + more * _spared_attention(plan, index)
            for index, (spared, more) in enumerate(zip(plan.results.spared_flops, attention, strict=False))
        ),
        epilogue_flops=plan.results.epilogue_flops + (head + wait * rate) / 3,
    )


def _range_seconds(plan: Plan, ceilings: Ceilings, computing: float) -> float:
    """Return the seconds that a loss of `computing` seconds waits for ranges of the head: all but the first come beside it."""
    if plan.head_slot_bytes is None:
        return 0.0
    way = ceilings.host_to_device_bytes_per_second if plan.visiting_head == "host" else ceilings.ssd_read_bytes_per_second
    coming = plan.ranged_head_bytes / way / plan.batch.num_micro_batches
    first = min(coming, plan.head_slot_bytes / way)
    return first + max(0.0, coming - first - computing)


def _spared_attention(plan: Plan, index: int) -> float:
    """Return the share of a block's attention that recompute need not do, because its output is kept or not needed."""
    names = plan.stash.operators[index] if index < len(plan.stash.operators) else ()
    count = names.count(ATTENTION)
    spared = (*plan.stash.skipped[index], *plan.stash.kept[index]) if count else ()
    return sum(names[ordinal] == ATTENTION for ordinal in spared) / max(1, count)


def simulated_plan(plan: Plan, ceilings: Ceilings, most_operations: int) -> Plan:
    """Return the plan that is simulated in place of `plan`: coarse, and without anything on which no operation depends."""
    whole = _with_rows(_with_elementwise(_with_samples(plan), ceilings))
    coarse = coarsened(_with_calls(whole, under(plan, ceilings)), under(plan, ceilings), most_operations)
    flops, experts = coarse.results, coarse.experts
    if experts is not None:  # as many bytes, in larger pieces
        most = max(experts.figures.num_experts)
        experts = replace(experts, in_round=max(experts.in_round, -(-most // _SIMULATED_ROUNDS)))
    return replace(
        coarse,
        experts=experts,
        batch=replace(coarse.batch, loss_chunk_tokens=0),
        stash=replace(coarse.stash, kept=(), skipped=(), operators=()),
        freed_memory="returned",
        results=Results(
            forward_flops=flops.forward_flops, epilogue_flops=flops.epilogue_flops, spared_flops=flops.spared_flops
        ),
    )


def _simulated(plan: Plan, ceilings: Ceilings) -> _Simulated:
    """Return the seconds of a step, the timeline of a usual one, and the bytes that a step writes. Seconds and bytes are means
    over checkpoints and the steps between them.
    """
    usual = _timeline_of(plan, ceilings, durable=plan.updates.checkpoint_every == 1)
    seconds, written_bytes = usual.step_seconds, usual.lanes[Lane.SSD_WRITE].bytes
    if plan.updates.checkpoint_every > 1 and plan.is_lazy:
        checkpoint = _timeline_of(plan, ceilings, durable=True)
        seconds += max(0.0, checkpoint.step_seconds - seconds) / plan.updates.checkpoint_every
        written_bytes += (checkpoint.lanes[Lane.SSD_WRITE].bytes - written_bytes) // plan.updates.checkpoint_every
    return seconds * _filling(plan), usual, written_bytes


def _simulated_seconds(plan: Plan, ceilings: Ceilings) -> float:
    """Return the seconds alone; they are the same, and found in less time."""
    rates = Rates(ceilings, plan.compute_dtype, plan.compute_threads, plan.updates.threads)
    shared = {"ranks": ranks_on(ceilings), "sharers": sharers_on(ceilings)}
    seconds = step_seconds_of(programs_of(plan, durable=plan.updates.checkpoint_every == 1, **shared), rates)
    if plan.updates.checkpoint_every > 1 and plan.is_lazy:
        checkpoint = step_seconds_of(programs_of(plan, durable=True, **shared), rates)
        seconds += max(0.0, checkpoint - seconds) / plan.updates.checkpoint_every
    return seconds * _filling(plan)


def _filling(plan: Plan) -> float:
    return plan.stage.filling if plan.stage else 1.0


def _timeline_of(plan: Plan, ceilings: Ceilings, *, durable: bool) -> Timeline:
    return simulate(
        programs_of(plan, durable=durable, ranks=ranks_on(ceilings), sharers=sharers_on(ceilings)),
        ceilings,
        compute_dtype=plan.compute_dtype,
        compute_threads=plan.compute_threads,
        update_threads=plan.updates.threads,
    )


def programs_of(plan: Plan, *, durable: bool, ranks: int = 1, sharers: int = 1) -> list[Program]:
    """Return consecutive programs from a cold start until they repeat; the one that repeats comes three times. They are those
    of one of `ranks` that share out every unit (`of_rank`); of a stage those without its neighbours.
    """
    programs: list[Program] = []
    before = Snapshot()
    while len(programs) < _MOST_PROGRAMS:
        if plan.stage:
            program, after = build_alone(plan, before, durable=durable)
        else:
            program, after = build_program(plan, plan.batch.num_micro_batches, before, durable=durable, shared=ranks > 1)
        if after == before:
            # Programs built from equal snapshots are equal, and the beginning does not matter to the steady state.
            return [of_rank(program, ranks, sharers)] * 3
        programs.append(of_rank(program, ranks, sharers))
        before = after
    return programs
