"""The wires by what users name them, found in the files of this folder, and which of them a run's options mean."""

import inspect
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

from headrace.terms.adapter import Lora, adapter_of
from headrace.terms.errors import ConfigError
from headrace.terms.gradient import GradientWay
from headrace.terms.named import read_named
from headrace.terms.options import Options
from headrace.update.wire import Wire
from headrace.update.wires.dense import Dense


def _found(option: str) -> Iterator[tuple[type[GradientWay], type[Wire]]]:
    """Yield what `option` may name, and the wires, by the names of their files."""
    for file in pkgutil.iter_modules(sys.modules[__package__].__path__):
        for wire in vars(import_module(f"{__package__}.{file.name}")).values() if file.name != "table" else ():
            if inspect.isclass(wire) and issubclass(wire, Wire):
                yield from ((way, wire) for way in wire.ways if way.named_by == option)


WIRES: dict[type[GradientWay], type[Wire]] = dict(_found(Dense.named_by))
"""What `gradient` names."""
ADAPTER_WIRES: dict[type[GradientWay], type[Wire]] = dict(_found(Lora.named_by))
"""What `adapter` names."""


def gradient_of(options: Options) -> GradientWay:
    """Return the way that `options` name, with its settings.

    Raises:
        ConfigError: there is no such way, or it has no such setting or value; the message names those that it has.
    """
    return way_of(options.gradient)


def way_of(text: str) -> GradientWay:
    """Return the way that `text` names: NAME, or NAME:KEY=VALUE,KEY=VALUE.

    Raises:
        ConfigError: as `gradient_of`.
    """
    return read_named("gradient", text, WIRES)


def wire_of(options: Options, begun: str | None = None) -> Wire:
    """Return the wire that `options` mean, for a run that was `begun` with the wire of that name (None: for a new one).

    Raises:
        ConfigError: as `gradient_of`, and as `adapter_of`; or both a gradient and an adapter are given.
    """
    way = gradient_of(options)
    if options.adapter is not None:
        if not isinstance(way, Dense):
            raise ConfigError(
                f"adapter and gradient: {way.name} trains subspaces, {options.adapter} adapters; give one of them"
            )
        adapter = adapter_of(options.adapter)
        return ADAPTER_WIRES[type(adapter)].asked(adapter, options)
    with suppress(ConfigError):  # the wire belongs to a program of its own; the check of the run says so
        way = way.begun(way_of(begun)) if begun else way
    return WIRES[type(way)].asked(way, options)
