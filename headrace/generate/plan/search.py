"""The search for a generation's plan: rows of a seat, seats, and how much memory is left for weights.

Invariants: the chosen plan fits; with more memory it is no slower, because everything that fitted before is still tried.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.generate.plan.block_tables import costs_with_waits
from headrace.generate.plan.cache_plan import cache_choices, with_inputs
from headrace.generate.plan.expert_search import ways_of_experts, with_cached_experts
from headrace.generate.plan.peaks import ATTENDING_OPERATIONS, with_peaks, with_weights
from headrace.generate.plan.plan import LEAST_PACKED_PASSES, PACKED_ROWS, GenerationPlan
from headrace.generate.plan.prefix_plan import PrefixPlan
from headrace.generate.plan.seat_shapes import PromptLengths, SeatShapes, most_of, shapes_to_try
from headrace.generate.plan.seconds import rough_seconds, rounds_of, seconds_of_all_tokens, with_forecast
from headrace.plan.clock.rates import Rates
from headrace.plan.value.allowance import Allowance
from headrace.plan.value.decoding import making_like
from headrace.plan.value.expert_plan import ExpertFigures
from headrace.plan.value.refusal import refusal
from headrace.terms.collector import without_collection
from headrace.terms.costs import GenerationCosts
from headrace.terms.errors import ConfigError, PlanInfeasible
from headrace.terms.forms import UnitFigures
from headrace.terms.machine.ceilings import Ceilings

# Each seat is a thread with its own threads of the library that multiplies, as many as compute has.
MOST_SEATS = 64
MOST_ROWS = 4096
_NO_PACKED = (
    "packed_products: asked for, but no plan with them fits. They need blocks in a published code, computed on a CPU, in an "
    "architecture that only multiplies by them. Give more --host-memory, or leave it out"
)
# With micro-batches by length, so many numbers of rounds without empty seats are tried.
_MOST_ROUNDS = 4
# The number of placements whose passes are simulated.
_MOST_SIMULATED = 24
# It is smaller where passes have many operations: so many pairs of a block and a seat.
_MOST_OPERATIONS = 20_000
# Of so many, the fastest, it is tried whether weights should come further ahead.
_MOST_AHEAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FewRowProducts:
    """How few rows are multiplied: `in_codes` where weights are coded, None where that is faster. `units` and `experts` are
    those with weights that stay in their codes; there may be none. `coded_rows` and `narrow_rows` are as in the plan.
    """

    in_codes: bool | None = False
    units: tuple[UnitFigures, ...] = ()
    experts: ExpertFigures | None = None
    coded_rows: int = 0
    narrow_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationQuestion:
    """What is asked: `prompts` prompts of up to `prompt_length` tokens, and up to `new_tokens` of each.

    `rows` and `seats` are fixed where they are given, `most_rows` bounds rows. `experts` are those of mixtures that may come
    by themselves. With `has_drives` keys and values may lie on the drives. `kept_copies` is as in the plan, and counted in
    `costs_of`. `prefill_chunks` are tried, 0 for whole prompts: `costs_of` is given rows, and a chunk that is not 0.
    `attention`: which of attending on the host (true) and where blocks are computed are tried. Where `lengths` are those of
    prompts, and rows are not fixed, short prompts may have more rows; as shapes of seats they are fixed. `costs_of` is then
    given a length. `prefixes` are as in the plan.
    """

    units: tuple[UnitFigures, ...]
    num_blocks: int
    compute_dtype: str
    costs_of: Callable[..., GenerationCosts]
    prompts: int
    prompt_length: int
    new_tokens: int
    allowance: Allowance
    machine: Ceilings
    rows: int | None = None
    seats: int | None = None
    most_rows: int | None = None
    experts: ExpertFigures | None = None
    has_drives: bool = False
    kept_copies: int = 0
    prefill_chunks: tuple[int, ...] = (0,)
    few_rows: FewRowProducts = FewRowProducts()
    attention: tuple[bool, ...] = (False,)
    lengths: PromptLengths | SeatShapes | None = None
    prefixes: PrefixPlan | None = None

    @property
    def separate_device(self) -> bool:
        """Whether blocks are computed in a memory of their own."""
        return self.allowance.device_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seating:
    """Rows and costs of a seat, as in the plan, and the numbers of seats to try."""

    rows: int
    seats: Sequence[int]
    costs: GenerationCosts
    shapes: SeatShapes | None = None
    most: GenerationCosts | None = None


@without_collection()
def make_generation_plan(question: GenerationQuestion) -> GenerationPlan:
    """Return the fastest plan that fits.

    Raises:
        PlanInfeasible: nothing fits; the message says which tier is short, and what would help.
        ConfigError: packed products are asked for, and there is no plan with them.
    """
    question = _decoding_on(question, question.machine)
    fitting = [plan for plan in _all_placements(question, _seatings(question)) if plan.fits]
    if not fitting and question.few_rows.in_codes:
        raise ConfigError(_NO_PACKED)
    if not fitting:
        raise _infeasible(question)
    plan = _best(question, fitting)
    lengths = question.lengths
    if isinstance(lengths, PromptLengths) and len(set(lengths.tokens)) > 1 and question.rows is None:
        same = replace(question, prefill_chunks=(plan.costs.prefill_chunk,), attention=(plan.caches.attends,))
        seatings = _seatings_by_length(same, lengths, plan)
        fitting = [each for each in _all_placements(same, seatings) if each.fits]
        plan = _best(same, fitting) if fitting else plan
    return with_forecast(plan, question.machine)


def _best(question: GenerationQuestion, fitting: list[GenerationPlan]) -> GenerationPlan:
    """Return the fastest of plans that fit, or of changes to the best of them."""
    rates = Rates(question.machine, question.compute_dtype, question.allowance.cores, None)
    fitting.sort(key=lambda plan: rough_seconds(plan, rates))
    # The places of attention are tried apart, so that no plan is slower because both may be chosen.
    groups = [[plan for plan in fitting if plan.caches.attends is attends] for attends in (False, True)]
    found = [_fastest(group[:_MOST_SIMULATED], rates, question.allowance) for group in groups if group]
    return min(found, key=lambda timed: timed[0])[1]


def _fastest(plans: Sequence[GenerationPlan], rates: Rates, allowance: Allowance) -> tuple[float, GenerationPlan]:
    """Return the fastest of `plans`, or of changes to the best of them, and its seconds.

    A change brings weights further ahead, or keeps prompts as inputs.
    """
    timed, operations = list[tuple[float, int, GenerationPlan]](), 0
    for index, plan in enumerate(plans):
        known = (seconds for seconds, _, other in timed if other == plan)  # slots filled in another order may be as many
        seconds = next(known, None)
        timed.append((seconds_of_all_tokens(plan, rates) if seconds is None else seconds, index, plan))
        operations += plan.num_blocks * plan.seats * (ATTENDING_OPERATIONS if plan.caches.attends else 1)
        if operations > _MOST_OPERATIONS:
            break
    best = [plan for *_, plan in sorted(timed)[:_MOST_AHEAD]]
    changed = [*_further_ahead(best), *_by_inputs(best, allowance)]
    timed += [(seconds_of_all_tokens(plan, rates), index, plan) for index, plan in enumerate(changed, len(timed))]
    return min(timed)[0], min(timed)[2]


def _by_inputs(plans: Sequence[GenerationPlan], allowance: Allowance) -> Iterator[GenerationPlan]:
    """Yield plans that keep prompts of some blocks as inputs, whose keys and values are computed again, if they fit."""
    for plan in plans:
        for caches in with_inputs(plan.caches, plan.costs) if plan.experts is None else ():
            changed = with_peaks(replace(plan, caches=caches), allowance)
            if changed.fits:
                yield changed


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
        return tuple(replace(unit, making_like=making_like(unit.decodes, machine)) for unit in units)

    experts = question.experts
    if experts is not None:
        like = making_like(experts.decodes, machine)
        experts = replace(experts, units=figured(experts.units), making_like=like)
    return replace(question, units=figured(question.units), experts=experts)


def _seatings(question: GenerationQuestion) -> Iterator[_Seating]:
    """Yield each number of rows and each chunk that is tried, or the shapes that are fixed."""
    if isinstance(question.lengths, SeatShapes):
        yield _seating_of(question, question.lengths, question.prefill_chunks[0])
        return
    for rows in _choices(question.prompts, question.rows, question.most_rows or MOST_ROWS):
        for chunk in question.prefill_chunks:
            costs = question.costs_of(rows, chunk) if chunk else question.costs_of(rows)
            yield _Seating(rows=rows, seats=_choices(-(-question.prompts // rows), question.seats, MOST_SEATS), costs=costs)


def _seatings_by_length(question: GenerationQuestion, lengths: PromptLengths, plan: GenerationPlan) -> Iterator[_Seating]:
    """Yield micro-batches by length, near to those of `plan`, in which all rows count as long as the longest.

    They take no more passes: forecasts may say that more passes with fewer bytes are faster, which was measured to be slower.
    """
    most_rows = question.most_rows or MOST_ROWS
    rounds = -(-len(lengths.tokens) // (plan.rows * plan.seats))
    for shapes in shapes_to_try(lengths, plan.rows, most_rows, question.new_tokens):
        if shapes.rows <= question.prompts:
            found = _seating_of(question, shapes, plan.costs.prefill_chunk)
            few = [seats for seats in found.seats if -(-len(shapes.each) // seats) <= rounds]
            yield replace(found, seats=few)


def _seating_of(question: GenerationQuestion, shapes: SeatShapes, chunk: int) -> _Seating:
    def costs_of(shape: tuple[int, int]) -> GenerationCosts:
        rows, length = shape
        return question.costs_of(rows, *([chunk] if chunk else []), length=length)

    most = most_of([costs_of(each) for each in shapes.ends(question.new_tokens)], question.new_tokens)
    costs = costs_of((shapes.rows, shapes.prompt_length))
    if most.recomputing is None:
        costs = replace(costs, recomputing=None)
    count = min(len(shapes.each), -(-question.prompts // shapes.rows))
    even = {-(-count // rounds) for rounds in range(1, _MOST_ROUNDS + 1)} if question.seats is None else set[int]()
    seats = sorted({*_choices(count, question.seats, MOST_SEATS), *(each for each in even if each <= MOST_SEATS)})
    return _Seating(rows=shapes.rows, seats=seats, costs=costs, shapes=shapes, most=most)


def _all_placements(question: GenerationQuestion, seatings: Iterable[_Seating]) -> Iterator[GenerationPlan]:
    """Yield plans with decoded weights, and with weights in their codes, if these are asked for or have passes enough."""
    seatings, few = list(seatings), question.few_rows
    if not few.in_codes:
        yield from _placements(question, seatings)
    if few.in_codes is False or not (few.units or few.experts):
        return
    few_rows = replace(few, coded_rows=PACKED_ROWS)
    in_codes = replace(question, few_rows=few_rows, units=few.units or question.units, experts=few.experts)
    for plan in _placements(in_codes, seatings):
        enough = rounds_of(plan) * (plan.new_tokens - 1) >= LEAST_PACKED_PASSES and plan.rows <= plan.packed_rows
        if (few.in_codes or enough) and (few.units or plan.experts is not None):
            yield plan


def _placements(question: GenerationQuestion, seatings: Iterable[_Seating]) -> Iterator[GenerationPlan]:
    """Yield plans with as many blocks in memory as fit, for each number of rows and seats; some do not fit."""
    rates = Rates(question.machine, question.compute_dtype, question.allowance.cores, None)
    for seating in seatings:
        costs = costs_with_waits(seating.costs, rates)
        for seats in seating.seats:
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
                    rows=seating.rows,
                    seats=seats,
                    prompts=question.prompts,
                    prompt_length=question.prompt_length,
                    new_tokens=question.new_tokens,
                    kept_copies=question.kept_copies,
                    packed_rows=question.few_rows.coded_rows,
                    narrow_rows=question.few_rows.narrow_rows,
                    host_slots=min(prefetch + 1, question.num_blocks),
                    device_slots=min(prefetch + 1, question.num_blocks),
                    prefetch=min(prefetch, question.num_blocks - 1),
                    compute_threads=question.allowance.cores,
                    costs=costs,
                    caches=replace(caches, prefixes=question.prefixes),
                    shapes=seating.shapes,
                    most=seating.most,
                )
                for way in ways_of_experts(least, None if caches.attends else question.experts, rates):
                    yield from _filled(way, question.allowance)


def _choices(most: int, given: int | None, limit: int) -> Sequence[int]:
    """Return the numbers to try: powers of two up to what there is, and that number itself."""
    if given is not None:
        return (max(1, min(given, most)),)
    top = min(most, limit)
    return sorted({*(1 << power for power in range(top.bit_length()) if 1 << power <= top), top})


def _filled(plan: GenerationPlan, allowance: Allowance) -> Iterator[GenerationPlan]:
    """Yield `plan` with more slots, as many as the budgets hold: first for blocks as compute reads them, or first as stored."""
    plan = with_peaks(plan, allowance)
    if not plan.fits:
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
            sizes = filled.weight_sizes
            more = (allowed - filled.peak(tier)) // (sizes.slot if on_device else sizes.stored)
            slots = min(plan.num_blocks, getattr(filled, name) + more)
            filled = with_weights(replace(filled, **{name: slots}), allowance)
            if filled.packs and not filled.fits:
                filled = with_weights(replace(filled, **{name: slots - 1}), allowance)
        if filled.experts is not None and allowance.host_bytes is not None:
            filled = with_weights(with_cached_experts(filled, allowance.host_bytes), allowance)
        yield filled


def _infeasible(question: GenerationQuestion) -> PlanInfeasible:
    few = replace(question, rows=question.rows or 1, seats=question.seats or 1)
    placements = [
        plan
        for plan in _placements(few, _seatings(few))
        if plan.peak("ssd") <= plan.results.allowed_bytes.get("ssd", plan.peak("ssd"))
    ]
    one = min(placements, key=lambda plan: (plan.peak("host"), plan.peak("device")))
    who = f"one seat of {one.rows} row{'s' if one.rows > 1 else ''} needs {{}}"
    return refusal(one, who, "fewer new tokens or shorter prompts" if question.rows is None else "fewer rows")
