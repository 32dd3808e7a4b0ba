"""The wires by what users name them, found in the files of this folder, and which of them a run's options mean."""

import inspect
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

from headrace.terms.errors import ConfigError
from headrace.terms.options.adapter import adapter_of
from headrace.terms.options.gradient import GradientWay
from headrace.terms.options.named import read_named
from headrace.terms.options.options import Options
from headrace.update.wires.dense import Dense
from headrace.update.wires.wire import Wire

# Files without a wire: this one, and those that need the model library, which is not imported before choices are checked.
_NO_WIRES = ("table", "stored_codes", "forms")


def _found() -> Iterator[tuple[type[GradientWay], type[Wire]]]:
    """Yield what users may name, and the wires, by the names of their files."""
    for file in pkgutil.iter_modules(sys.modules[__package__].__path__):
        for wire in vars(import_module(f"{__package__}.{file.name}")).values() if file.name not in _NO_WIRES else ():
            if inspect.isclass(wire) and issubclass(wire, Wire):
                yield from ((way, wire) for way in wire.ways)


WIRES: dict[type[GradientWay], type[Wire]] = dict(sorted(_found(), key=lambda found: found[0].named_by != Dense.named_by))
"""The wires by their ways: first those that `gradient` names, then those of other options."""


def way_of(text: str) -> GradientWay:
    """Return the way that `text` names for the option `gradient`: NAME, or NAME:KEY=VALUE,KEY=VALUE.

    Raises:
        ConfigError: there is no such way, or it has no such setting or value; the message names those that it has.
    """
    return read_named(Dense.named_by, text, [way for way in WIRES if way.named_by == Dense.named_by])


def wire_of(options: Options, begun: str | None = None) -> Wire:
    """Return the wire that `options` mean, for a run that was `begun` with the wire of that name (None: for a new one).

    Raises:
        ConfigError: as `way_of`, and as `adapter_of`; or both a gradient and an adapter are given.
    """
    way = way_of(options.gradient)
    if options.adapter is not None:
        if not isinstance(way, Dense):
            raise ConfigError(f"adapter and gradient: {options.adapter} and {way.name} train other things; give one of them")
        way = adapter_of(options.adapter)
    elif begun:
        with suppress(ConfigError):  # the wire belongs to a program of its own; the check of the run says so
            way = way.begun(way_of(begun))
    return WIRES[type(way)](way, options.seed)
