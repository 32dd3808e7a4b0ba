"""Checks figures that people and machines wrote down. A missing, unknown or absurd figure is refused by its name."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.terms.errors import ConfigError
from headrace.terms.lanes import Lane

# Two rates measured together may exceed the sum of the two measured alone by noise, not by more.
_NOISE = 1.1


def mapping_of(values: object, *, where: str) -> Mapping[str, Any]:
    """Return `values` if they are an object with named figures; `where` names the place in errors, here and below."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: expected an object with named figures, found {values!r}")
    return values


def refuse_unknown(figures: Mapping[str, Any], known: set[str], *, where: str) -> None:
    """Refuse names that are not `known`."""
    unknown = sorted(str(name) for name in figures if name not in known)
    if unknown:
        raise ConfigError(f"{where}: unknown field {', '.join(unknown)}; the fields are {', '.join(sorted(known))}")


def number(figures: Mapping[str, Any], name: str, *, where: str) -> float:
    """Return figure `name` if it is a finite number."""
    if name not in figures:
        raise ConfigError(f"{where}: {name} is missing; measure it with 'headrace bench machine' or write it into the profile")
    value = figures[name]
    # Python takes a bool for an int, and 10**400 for a number, though no float holds it. Neither is a figure.
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or not math.isfinite(value):
        raise ConfigError(f"{where}: {name} is {value!r}; write a finite number")
    return value


def figure(figures: Mapping[str, Any], name: str, *, where: str, most: float) -> float:
    """Return figure `name` if it lies in `(0, most]`."""
    value = number(figures, name, where=where)
    if not 0 < value <= most:
        raise ConfigError(f"{where}: {name} is {value!r}; it must be above 0 and at most {most:.3g} (is the unit right?)")
    return float(value)


def optional_figure(figures: Mapping[str, Any], name: str, *, where: str, most: float) -> float | None:
    """Return a figure as `figure` does, or None where there is none. Raises likewise."""
    return None if figures.get(name) is None else figure(figures, name, where=where, most=most)


def whole(figures: Mapping[str, Any], name: str, *, where: str, most: float) -> int:
    """Return figure `name` if it is a whole number in `(0, most]`."""
    value = figure(figures, name, where=where, most=most)
    if value != int(value):
        raise ConfigError(f"{where}: {name} is {value!r}; it must be a whole number")
    return int(figures[name])


def optional_whole(figures: Mapping[str, Any], name: str, *, where: str, most: float, multiple_of: int = 1) -> int | None:
    """Return figure `name` if it lies in `[1, most]` and is a multiple; None where it is absent or null."""
    if figures.get(name) is None:
        return None
    value = whole(figures, name, where=where, most=most)
    if value % multiple_of:
        raise ConfigError(f"{where}: {name} is {value!r}; it must be a multiple of {multiple_of}")
    return value


def rates_of(
    figures: Mapping[str, Any], name: str, known: Iterable[str] | None, *, where: str, most: float
) -> dict[str, float]:
    """Return the rates by name in `figures[name]`, none where it is absent. `known` are the names that may be there, None: any.

    Raises:
        ConfigError: it is no object, a name is not `known`, or a rate absurd.
    """
    where = f"{where}: {name}"
    rates = mapping_of(figures.get(name, {}), where=where)
    if known is not None:
        refuse_unknown(rates, set(known), where=where)
    return {each: figure(rates, each, where=where, most=most) for each in rates}


def texts_of(figures: Mapping[str, Any], name: str, *, where: str) -> dict[str, str]:
    """Return the texts by name in `figures[name]`, none where it is absent.

    Raises:
        ConfigError: it is no object, or one of them no text.
    """
    texts = mapping_of(figures.get(name, {}), where=f"{where}: {name}")
    for key, text in texts.items():
        if not isinstance(text, str):
            raise ConfigError(f"{where}: {name}[{key}] is {text!r}; write a text")
    return dict(texts)


def refuse_excess(rates: Mapping[str, float], together: str, alone: tuple[str, ...], *, where: str) -> None:
    """Refuse a rate of several things at once that is more than the sum of theirs."""
    limit = sum(rates[name] for name in alone)
    if rates[together] > _NOISE * limit:
        raise ConfigError(
            f"{where}: {together} is {rates[together]:.4g}, more than {' + '.join(alone)} = {limit:.4g}; measure them again"
        )


def names_of(figures: Mapping[str, Any], name: str, known: Sequence[str], *, where: str) -> tuple[str, ...]:
    """Return the names listed in `figures[name]`, none where it is absent; each must be `known`."""
    names = figures.get(name, [])
    if not isinstance(names, list | tuple) or not set(map(str, names)) <= set(known):
        raise ConfigError(f"{where}: {name} is {names!r}; write a list of some of {', '.join(known)}")
    return tuple(names)


def amount(figures: Mapping[str, Any], name: str, *, where: str, most: float, unit: str = "") -> float:
    """Return a figure that, unlike a rate, may be zero, and is zero when absent.

    Raises:
        ConfigError: it is no number, below zero or above `most`.
    """
    value = number(figures, name, where=where) if name in figures else 0.0
    if not 0 <= value <= most:
        raise ConfigError(f"{where}: {name} is {value!r}; it must be between 0 and {most:.3g}{unit}")
    return float(value)


def slowdowns_of(figures: Mapping[str, Any], *, where: str) -> dict[str, dict[str, float]]:
    """Return the share of its rate that each lane keeps beside others, by their names.

    Raises:
        ConfigError: a lane is unknown, or a share is none.
    """
    where = f"{where}: slowdowns"
    lanes = {str(lane) for lane in Lane}
    slowdowns = {}
    table = mapping_of(figures.get("slowdowns", {}), where=where)
    refuse_unknown(table, lanes, where=where)
    for lane in table:
        others = mapping_of(table[lane], where=f"{where}[{lane}]")
        refuse_unknown(others, lanes - {lane}, where=f"{where}[{lane}]")
        slowdowns[lane] = {other: figure(others, other, where=f"{where}[{lane}]", most=1.0) for other in others}
    return slowdowns
