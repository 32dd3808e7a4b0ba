"""Fields of a value's groups, given and read by flat names as well: those that plans had before their fields were grouped.

For programs outside of the package, and for plans of format 2: `replace(plan, late_units=())` and `plan.late_units` stand for
`replace(plan, updates=replace(plan.updates, late_units=()))` and `plan.updates.late_units`. The package itself uses groups.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

_Grouped = TypeVar("_Grouped")


def with_flat_names(
    groups: Mapping[str, type[Any]], flat_names: Mapping[str, tuple[str, str]]
) -> Callable[[type[_Grouped]], type[_Grouped]]:
    """Return a decorator of dataclasses with these `groups` among their fields; `flat_names` say group and field of each."""

    def decorated(cls: type[_Grouped]) -> type[_Grouped]:
        grouped: Any = cls.__init__

        def __init__(self: _Grouped, **values: Any) -> None:
            given: dict[str, dict[str, Any]] = {}
            for name in flat_names.keys() & values:
                group, field = flat_names[name]
                given.setdefault(group, {})[field] = values.pop(name)
            for group, found in given.items():
                values[group] = replace(values[group], **found) if group in values else groups[group](**found)
            grouped(self, **values)

        def __getattr__(self: _Grouped, name: str) -> Any:
            if name not in flat_names:
                raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}", name=name, obj=self)
            group, field = flat_names[name]
            return getattr(getattr(self, group), field)

        for each in (__init__, __getattr__):
            setattr(cls, each.__name__, each)
        return cls

    return decorated
