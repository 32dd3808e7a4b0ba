"""A plan as it is stored: the format of its JSON values, and how they are read back."""

from typing import Any

from headrace.plan.value.choices import FLAT_NAMES, GROUPS, Hosted
from headrace.plan.value.expert_plan import ExpertParts
from headrace.plan.value.results import Results
from headrace.plan.value.stage_place import StageChoices
from headrace.terms.block_parts import BlockParts
from headrace.terms.embedding_rows import EmbeddingRows
from headrace.terms.errors import ConfigError
from headrace.terms.forms import UnitFigures
from headrace.terms.rule_figures import RuleFigures

# In format 3 what every plan has is under `placement`, and choices are in groups; format 2, which is read, too, has no groups.
PLAN_FORMAT = 3
_READ = (2, PLAN_FORMAT)

# Nothing is said of these where they are None.
_LEFT_OUT = ("experts", "hosted", "embedding", "visiting_head", "head_slot_bytes", "parts", "stage")


def json_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's fields as they are stored: with the format, without what comes with blocks, or stays."""
    batch = {name: value for name, value in values["batch"].items() if name != "pages" or value}
    stored = {"format": PLAN_FORMAT, **values, "batch": batch}
    return {name: value for name, value in stored.items() if name not in _LEFT_OUT or value is not None}


def stored_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the plan that `values` are (`Plan.to_json`).

    Raises:
        ConfigError: they have another format.
    """
    known: dict[str, Any] = {**values.get("placement", {}), **values}
    found = known.pop("format", 1)
    if found not in _READ:
        raise ConfigError(
            f"plan: format {found!r}, this version reads formats {' and '.join(map(str, _READ))}; use the version of headrace "
            "that wrote it, or begin a new run"
        )
    known.pop("placement", None)
    groups = {group: known.pop(group, {}) for group in GROUPS}
    grouped = {name: groups[group][field] for name, (group, field) in FLAT_NAMES.items() if field in groups[group]}
    known = grouped | known
    known["units"] = tuple(map(UnitFigures.from_json, known["units"]))
    known["rule"] = RuleFigures.from_json(known["rule"])
    known["own_rule"] = RuleFigures.from_json(known["own_rule"]) if known.get("own_rule") else None
    for name in ("resident_states", "late_units", "stash_tiers", "kept_bytes"):
        known[name] = tuple(known[name])
    known["experts"] = ExpertParts.from_json(known["experts"]) if known.get("experts") else None
    known["hosted"] = Hosted(**known["hosted"]) if known.get("hosted") else None
    known["embedding"] = EmbeddingRows(**known["embedding"]) if known.get("embedding") else None
    known["parts"] = BlockParts.from_json(known["parts"]) if known.get("parts") else None
    known["stage"] = StageChoices.from_json(known.get("stage"))
    known["results"] = Results.from_json(known["results"])
    for name in ("kept", "skipped", "operators"):
        known[name] = tuple(tuple(items) for items in known[name])
    return known
