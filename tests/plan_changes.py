"""Plans whose choices tests name without their groups: `changed(plan, late_units=(), policy="deferred")`."""

from dataclasses import fields, replace
from typing import Any

from headrace.plan.value.choices import BatchShape, Gradients, Stash, Updates
from headrace.plan.value.plan import Plan

_GROUPS: dict[str, type[Any]] = {"batch": BatchShape, "stash": Stash, "gradients": Gradients, "updates": Updates}
# Names that say nothing without their group, and what tests call them.
_SAID = {
    "stash": {"tiers": "stash_tiers", "slots": "stash_slots"},
    "gradients": {"dtype": "gradient_dtype", "held": "held_gradients", "slots": "gradient_slots", "order": "gradient_sum"},
    "updates": {"policy": "update_policy", "threads": "update_threads", "device_every": "device_update_every"},
}
_PLACES = {
    _SAID.get(group, {}).get(each.name, each.name): (group, each.name) for group, cls in _GROUPS.items() for each in fields(cls)
}


def grouped(values: dict[str, Any]) -> dict[str, Any]:
    """Return fields of a plan, by group where they belong to one; others stay as they are."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in _PLACES:
            group, field = _PLACES[name]
            found.setdefault(group, {})[field] = value
        else:
            found[name] = value
    return found


def changed(plan: Plan, **values: Any) -> Plan:
    """Return a plan with other choices, whose groups need not be named."""
    found = grouped(values)
    groups = {group: replace(getattr(plan, group), **found.pop(group)) for group in _GROUPS.keys() & found}
    return replace(plan, **found, **groups)


def plan_of_fields(**values: Any) -> Plan:
    """Return a plan of these fields."""
    found = grouped(values)
    return Plan(**{name: _GROUPS[name](**value) if name in _GROUPS else value for name, value in found.items()})
