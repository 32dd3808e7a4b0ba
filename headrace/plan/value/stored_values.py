"""Values that were stored as JSON come back as what `dataclasses.asdict` made them of: their classes say the types.

A field that is absent has its default, so a class may get new ones.
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

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
