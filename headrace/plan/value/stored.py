"""A plan as it is stored: the format of its JSON values, and how they are read back."""

from typing import Any

from headrace.terms.errors import ConfigError

# What every plan has is under `placement`, other choices are in groups. A new field with a default needs no new format.
PLAN_FORMAT = 3

# Nothing is said of these where they are None.
_LEFT_OUT = ("experts", "hosted", "embedding", "visiting_head", "head_slot_bytes", "parts", "stage")


def json_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's fields as they are stored: with the format, without what comes with blocks, or stays."""
    batch = {name: value for name, value in values["batch"].items() if name != "pages" or value}
    stored = {"format": PLAN_FORMAT, **values, "batch": batch}
    return {name: value for name, value in stored.items() if name not in _LEFT_OUT or value is not None}


def stored_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the plan that `values` are (`Plan.to_json`), as they are stored.

    Raises:
        ConfigError: they have another format.
    """
    known: dict[str, Any] = {**values.get("placement", {}), **values}
    found = known.pop("format", 1)
    if found != PLAN_FORMAT:
        raise ConfigError(
            f"plan: format {found!r}, this version reads format {PLAN_FORMAT}; use the version of headrace that wrote it, or "
            "begin a new run"
        )
    known.pop("placement", None)
    return known
