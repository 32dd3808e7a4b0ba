"""The nearest variants that fit, for a question that has no plan.

Each changes one thing if one is enough: fewer tokens per step, shorter sequences, no clipping, smaller states, another rule,
more memory or space.
Invariant: every variant returned has been planned, and fits.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from headrace.ask.question import Question
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError, PlanInfeasible
from headrace.terms.machine.drives import MOST_BYTES
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.sizes import GIB, MIB, format_bytes, round_up
from headrace.update import rule_of
from headrace.update.rules.table import RULES
from headrace.update.wires import WIRES
from headrace.update.wires.dense import Dense

PlanOf = Callable[["Question"], Plan]
Candidate = tuple[str, dict[str, Any], "Question"]
Variant = tuple[str, dict[str, Any], Plan]

_SHORTEST_SEQUENCE = 128
# More memory in one tier may move the shortage to another; that settles within a few rounds or never.
_MOST_ROUNDS = 8
_OPTIONS = {"host": "host_memory", "device": "device_memory", "ssd": "ssd_space"}
_WORDS = {"host": "host memory", "device": "device memory", "ssd": "SSD space"}


def nearest_variants(
    question: Question, refusal: PlanInfeasible, plan: PlanOf, out_of_time: Callable[[], bool]
) -> tuple[Variant, ...]:
    """Return variants that fit of `question`, which `plan` answered with `refusal`: the change, its options, and the plan.

    More of the tier that is short is tried as far as machines have it; other variants are tried until `out_of_time`.
    """
    found = list(_more_bytes(question, refusal, plan))
    if refusal.tier != "device":  # states are never on the device
        found += _first_that_fits(smaller_states(question), plan, out_of_time)
        for other in (*other_wires(question), *other_rules(question)):
            found += _first_that_fits([other], plan, out_of_time)
    smallest = list(_one_short_sequence(question))[-1:]
    if not list(_first_that_fits(smallest, plan, out_of_time)):
        return tuple(found)  # the weights alone are too large
    changes = [_fewer_tokens(question), _no_clipping(question), _shorter_sequences(question)]
    smaller = [variant for change in changes for variant in _first_that_fits(change, plan, out_of_time)]
    # Two changes at once are tried only where one is not enough.
    return (*found, *(smaller or _first_that_fits(_one_short_sequence(question), plan, out_of_time)))


def _first_that_fits(candidates: Iterable[Candidate], plan: PlanOf, out_of_time: Callable[[], bool]) -> Iterator[Variant]:
    for change, options, question in candidates:
        if out_of_time():
            return
        try:
            yield change, options, plan(question)
        except (PlanInfeasible, ConfigError):  # some ways cannot train this model
            continue
        return


def _fewer_tokens(question: Question) -> Iterator[Candidate]:
    workload = question.workload
    sequences = workload.sequences // 2
    while sequences >= 1:
        tokens = sequences * workload.sequence_length
        yield (
            f"{tokens} tokens per step instead of {workload.tokens_per_step}",
            {"tokens_per_step": tokens},
            question.with_workload(tokens_per_step=tokens),
        )
        sequences //= 2


def _shorter_sequences(question: Question) -> Iterator[Candidate]:
    """Yield the question with the same number of tokens in shorter rows."""
    workload = question.workload
    length = workload.sequence_length // 2
    while length >= _SHORTEST_SEQUENCE:
        if workload.tokens_per_step % length == 0:
            yield (
                f"sequences of {length} tokens instead of {workload.sequence_length}",
                {"sequence_length": length},
                question.with_workload(sequence_length=length),
            )
        length //= 2


def _one_short_sequence(question: Question) -> Iterator[Candidate]:
    length = question.workload.sequence_length
    while length >= min(_SHORTEST_SEQUENCE, question.workload.sequence_length):
        yield (
            f"steps of one sequence of {length} tokens",
            {"sequence_length": length, "tokens_per_step": length},
            question.with_workload(sequence_length=length, tokens_per_step=length),
        )
        length //= 2


def smaller_states(question: Question) -> Iterator[Candidate]:
    """Yield the question with smaller states of the same rule, if the rule has such a form and the wire takes it."""
    if smaller := question.optimizer.smaller():
        words, optimizer = smaller
        other = replace(question, optimizer=optimizer)
        with suppress(ConfigError):  # some wires do not take smaller states
            other.wire.refuse(optimizer)
            yield words, {"optimizer": optimizer.text}, other


def other_rules(question: Question) -> Iterator[Candidate]:
    """Yield the question under rules that keep less, if all is trained in place; words say what is given up."""
    if question.wire.name != Dense.name:
        return
    now, own = question.optimizer, _bytes_per_element(question.optimizer, question.compute_dtype)
    common = {each.name: getattr(now, each.name) for each in fields(Optimizer)}
    for kind in RULES:
        if kind.is_offered and kind.name != now.name:
            other = kind(**common)
            if (size := _bytes_per_element(other, question.compute_dtype)) < own:
                words = f"{kind.name}, {size} bytes a parameter instead of {own} ({kind.gives_up})"
                yield words, {"optimizer": kind.name}, replace(question, optimizer=other)


def _bytes_per_element(optimizer: Optimizer, compute_dtype: str) -> int:
    planes = rule_of(optimizer, compute_dtype).planes
    whole = (plane for plane in (planes.weight, *planes.states) if plane.of == "element")
    return round(sum(plane.bytes_per_element / plane.elements_per_value for plane in whole))


def other_wires(question: Question) -> Iterator[Candidate]:
    """Yield the question with something else trained than all weights, in the ways that go together with its rule."""
    if question.wire.name != Dense.name:
        return
    for way, wire in ((way, wire) for way, wire in WIRES.items() if way.offer):
        settings = way()
        other = replace(question, wire=wire(settings), gradient_dtype=question.gradient_dtype or settings.gradient_dtype)
        with suppress(ConfigError):  # some wires do not take some rules
            other.wire.refuse(other.optimizer)
            yield way.offer.format_map(vars(settings)), {way.named_by: way.name}, other


def _no_clipping(question: Question) -> Iterator[Candidate]:
    if question.workload.clip:
        words = "no clipping to a global norm (gradients need not be held until it is known)"
        yield words, {"max_grad_norm": 0}, question.with_workload(clip=False)


def _more_bytes(question: Question, refusal: PlanInfeasible, plan: PlanOf) -> Iterator[Variant]:
    """Yield the question with as much of each short tier as is needed, if that ends below what machines have."""
    grown: dict[str, int] = {}
    for _ in range(_MOST_ROUNDS):
        tier = refusal.tier
        # Rounded to sizes that people buy and type.
        grown[tier] = round_up(
            max(refusal.needed_bytes, grown.get(tier, 0) + 1), GIB if refusal.needed_bytes > 4 * GIB else MIB
        )
        if grown[tier] > MOST_BYTES or not question.may_ask_for(tier, grown[tier]):
            return  # no machine has that much, or not this one
        question = question.with_bytes(tier, grown[tier])
        try:
            found = plan(question)
        except PlanInfeasible as error:
            refusal = error
            continue
        allowed = {_WORDS[name]: format_bytes(size) for name, size in grown.items()}
        change = " and ".join(f"{size} of {words}" for words, size in allowed.items())
        yield change, {_OPTIONS[name]: size for name, size in grown.items()}, found
        return
