"""A plan as it is stored: the format of its JSON values, and how they are read back."""

from typing import Any

from headrace.plan.results import Results
from headrace.terms.errors import ConfigError
from headrace.terms.forms import UnitFigures
from headrace.terms.rule_figures import RuleFigures

# In format 2 results are a value of their own. Plans of format 1 did not name their format.
PLAN_FORMAT = 2


def stored_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the plan that `values` are (`Plan.to_json`).

    Raises:
        ConfigError: they have another format.
    """
    known = dict(values)
    found = known.pop("format", 1)
    if found != PLAN_FORMAT:
        raise ConfigError(
            f"plan: format {found!r}, this version reads format {PLAN_FORMAT}; use the version of headrace that wrote it, "
            "or begin a new run"
        )
    known["units"] = tuple(map(UnitFigures.from_json, known["units"]))
    known["rule"] = RuleFigures.from_json(known["rule"])
    known["own_rule"] = RuleFigures.from_json(known["own_rule"]) if known.get("own_rule") else None
    for name in ("resident_states", "late_units", "stash_tiers", "kept_bytes"):
        known[name] = tuple(known[name])
    known["results"] = Results.from_json(known["results"])
    for name in ("kept", "skipped", "operators"):
        known[name] = tuple(tuple(items) for items in known[name])
    return known
