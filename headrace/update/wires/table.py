"""The ways for gradients, one row for each, and which wire a run's options mean."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headrace.terms.adapter import adapter_of
from headrace.terms.errors import ConfigError
from headrace.terms.gradient import GradientWay
from headrace.terms.named import read_named
from headrace.terms.options import Options
from headrace.update.wire import Wire
from headrace.update.wires.adapter import AdapterWire
from headrace.update.wires.dense import Dense, DenseWire
from headrace.update.wires.lsp import Lsp, LspWire

if TYPE_CHECKING:
    from headrace.model import Chain

WIRES: Mapping[type[GradientWay], Callable[[Any], Wire]] = {Dense: lambda settings: DenseWire(), Lsp: LspWire}


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
        return AdapterWire(adapter_of(options.adapter), options.seed)
    with suppress(ConfigError):  # the wire belongs to a program of its own; the check of the run says so
        way = way.begun(way_of(begun)) if begun else way
    return WIRES[type(way)](way)


def wire_on(wire: Wire, chain: "Chain") -> Wire:
    """Return `wire` for the units of `chain`: a wire of adapters has to know their modules.

    Raises:
        ConfigError: as `AdapterWire.of`.
    """
    return wire.of(chain) if isinstance(wire, AdapterWire) and wire.adapters is None else wire
