"""What a step leaves to the next one: filled slots, what is under way in each buffer, updates still to be done.

References to operations are as in `program`: an index, or `~index` for one of the previous program.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from headrace.plan.plan import Plan

Refs = tuple[int, ...]


class Slot(NamedTuple):
    """A weight buffer: which block is in it, what makes its content valid, what still reads it."""

    unit: int = -1
    ready: Refs = ()
    busy: Refs = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """What a program leaves to its successor: contents of slots, and references to the operations to wait for."""

    host: tuple[Slot, ...]
    device: tuple[Slot, ...]
    state_busy: tuple[Refs, ...]
    gradient_busy: tuple[Refs, ...]  # per slot: the ring, the resident units', then one for each unit
    stash_busy: tuple[Refs, ...]
    weights_stored: tuple[Refs, ...]  # per unit: the writes that put its newest weights on the SSD
    states_stored: tuple[Refs, ...]
    resident_ready: tuple[Refs, ...]  # per unit: what made the resident weights valid
    device_state_busy: tuple[Refs, ...] = ()
    staging_busy: Refs = ()  # the host copy through which resident weights reach a separate device
    held: tuple[Refs, ...] = ()  # per unit: what made its held gradient valid
    written: Refs = ()  # by the step, so far: the commit that its successor does waits for it
    commit: Refs = ()
    decide: Refs = ()
    pending: tuple[int, ...] = ()  # units (not references) whose update is still to be done


def cold_carry(plan: Plan) -> Carry:
    """Return the carry of a step that follows nothing: empty slots, nothing pending."""
    per_unit: tuple[Refs, ...] = ((),) * len(plan.units)
    return Carry(
        host=(Slot(),) * plan.host_slots,
        device=(Slot(),) * plan.device_slots,
        state_busy=((),) * plan.state_slots,
        gradient_busy=((),) * (plan.gradient_slots + 1 + len(plan.units)),
        stash_busy=((),) * plan.stash_slots,
        weights_stored=per_unit,
        states_stored=per_unit,
        resident_ready=per_unit,
        held=per_unit,
        device_state_busy=((),) * plan.device_state_slots,
    )


def redo_carry(plan: Plan) -> Carry:
    """Return the carry after a step was taken back whose gradients are held still: every update is to be done again."""
    return replace(cold_carry(plan), pending=tuple(range(len(plan.units))))


def _map_refs(value: Any, change: Callable[[Refs], Refs]) -> Any:
    """Apply `change` to each tuple of references inside a carry's field."""
    if isinstance(value, Slot):
        return Slot(value.unit, change(value.ready), change(value.busy))
    if isinstance(value, tuple) and all(isinstance(item, int) for item in value):
        return change(value)
    return tuple(_map_refs(item, change) for item in value)


def renumbered(carry: Carry, change: Callable[[Refs], Refs]) -> Carry:
    """Return `carry` with `change` applied to each tuple of references."""
    refs = {field.name: getattr(carry, field.name) for field in fields(Carry) if field.name != "pending"}
    return Carry(**{name: _map_refs(value, change) for name, value in refs.items()}, pending=carry.pending)
