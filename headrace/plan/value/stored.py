"""A plan as it is stored: the format of its JSON values, and how they are read back: by the types that its classes say.

A field that is absent has its default, so a class may get new ones.
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

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


_Value = TypeVar("_Value")
_PLAIN = {bool: (bool,), int: (int,), str: (str,), float: (int, float)}
_hints = cache(get_type_hints)


def from_stored(cls: type[_Value], stored: object) -> _Value:
    """Return the value of a dataclass that was stored as `stored`, a JSON object.

    Raises:
        TypeError, KeyError, ValueError, AttributeError: it is no such value; an unknown field is a KeyError.
    """
    return cast(_Value, _value(cls, stored, ""))


def _value(kind: Any, stored: Any, name: str) -> Any:
    origin, of = get_origin(kind), get_args(kind)
    if origin is UnionType:
        (kind,) = set(of) - {NoneType}
        return None if stored is None else _value(kind, stored, name)
    if origin is tuple:
        kinds = of[:1] * len(stored) if of[-1] is Ellipsis else of
        return tuple(_value(*each, name) for each in zip(kinds, stored, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _value(of[1], each, name) for key, each in stored.items()}
    if is_dataclass(kind):
        hints = _hints(cast(Any, kind))
        return cast(Any, kind)(**{field: _value(hints[field], each, field) for field, each in stored.items()})
    if issubclass(kind, tuple):  # a named one, which JSON has made a list of
        return kind(*(_value(*each, name) for each in zip(_hints(kind).values(), stored, strict=False)))
    if issubclass(kind, Enum):
        return kind(stored)
    if type(stored) not in _PLAIN[kind]:
        raise TypeError(f"{name} is {stored!r}")
    return stored
