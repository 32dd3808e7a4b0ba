"""Bind a model's parameters to flat buffers, unit by unit, and release them again.

Invariant: a parameter is either a view of the buffer that its unit is bound to, or on the meta device. No parameter outlives
its buffer. Binding replaces the `Parameter` objects, it never writes into storage that a live graph may refer to.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from headrace.terms.errors import ModelError, StepFailed
from headrace.terms.layout import ParameterSpec, UnitLayout

GradientSink = Callable[[ParameterSpec, torch.Tensor], None]
# Takes the gradient of some rows of a parameter, from the element that is the last argument on.
RowSink = Callable[[ParameterSpec, torch.Tensor, int], None]

# Gives what is bound of a unit, by name, from its slot: parameters, and what stands for some.
Bound = Callable[[torch.Tensor], Iterable[tuple[str, Any]]]
# Brings the rows from the first to the second number; valid until others are asked for.
BringRows = Callable[[int, int], torch.Tensor]

# The attributes of a bound parameter that take gradients of its rows, and that bring its rows.
_ROWS, _COMING = "headrace_rows", "headrace_coming"


class Binding:
    """Which unit of a model is bound to which buffer. `layouts` name every parameter of `model` once.

    What units have in the place of views of their buffers, `others` give.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: Sequence[UnitLayout],
        dtype: torch.dtype,
        others: Mapping[int, Bound] = MappingProxyType({}),
    ) -> None:
        self._others = others
        self._layouts = tuple(layouts)
        self._dtype = dtype
        self._owners = parameter_owners(model)
        self._meta = {name: getattr(*places[0]) for name, places in self._owners.items()}
        self._bound: set[int] = set()
        # By the tensor that a unit was bound to as loaded: its parameters, made once where it is bound in each pass.
        self._loaded = WeakTensorKeyDictionary()

    def bind(
        self,
        unit: int,
        flat: torch.Tensor,
        sink: GradientSink | None,
        wanted: Callable[[ParameterSpec], bool] = lambda spec: True,
        *,
        rows: RowSink | None = None,
        as_loaded: bool = False,
        rest: UnitLayout | None = None,
    ) -> None:
        """Make the parameters of `unit` views of `flat`, a 1-D tensor of the compute dtype with the layout's elements. One
        number that is repeated stands for weights that are not here.

        With a `sink`, each gradient is handed over once it is complete for the running backward, and then dropped. A parameter
        used in several backwards of a step is handed over in each. A parameter needs no gradient if there is no sink or it is
        not `wanted`. With `as_loaded` it still says that it needs one, as the parameters of a loaded model do. Torch then folds
        products differently and rounds differently, even if no gradient is computed. `rows` takes gradients that come by rows;
        without it the sink gets wholes that are zero elsewhere. Where the others come in parts, `flat` has the `rest` alone.

        Raises:
            ModelError: `flat` has another length, shape or dtype than the layout asks for.
        """
        if unit in self._others:
            for name, value in self._others[unit](flat):
                self._place(name, nn.Parameter(value) if isinstance(value, torch.Tensor) else value)
            self._bound.add(unit)
            return
        if as_loaded and sink is None and rest is None:
            for name, parameter in self._loaded_from(unit, flat):
                self._place(name, parameter)
            self._bound.add(unit)
            return
        for spec, view in self._views(unit, flat, rest):
            takes = sink is not None and wanted(spec)
            parameter = nn.Parameter(view, requires_grad=takes or as_loaded)
            if sink is not None and takes:
                parameter.register_post_accumulate_grad_hook(hand_over(spec, sink))  # type: ignore[no-untyped-call]
                setattr(parameter, _ROWS, partial(rows or by_wholes(sink), spec))
            self._place(spec.name, parameter)
        self._bound.add(unit)

    def _loaded_from(self, unit: int, flat: torch.Tensor) -> Sequence[tuple[str, nn.Parameter]]:
        """Return the parameters of `unit` by name, as views of `flat`: the same as long as that tensor lives."""
        found: dict[int, Sequence[tuple[str, nn.Parameter]]] = self._loaded.setdefault(flat, {})  # type: ignore[no-untyped-call]
        if unit not in found:
            found[unit] = [(spec.name, nn.Parameter(view)) for spec, view in self._views(unit, flat, None)]
        return found[unit]

    def _views(self, unit: int, flat: torch.Tensor, rest: UnitLayout | None) -> Iterator[tuple[ParameterSpec, torch.Tensor]]:
        layout, dense = rest or self._layouts[unit], flat.is_contiguous() or flat.stride() == (0,)
        if flat.dtype != self._dtype or flat.dim() != 1 or flat.numel() != layout.num_elements or not dense:
            raise ModelError(
                f"unit {unit} ({layout.name}): expected a contiguous 1-D tensor of {layout.num_elements} x {self._dtype}, "
                f"found shape {tuple(flat.shape)} of {flat.dtype}"
            )
        for spec in layout.parameters:
            yield spec, flat.detach()[spec.offset : spec.offset + spec.num_elements].view(spec.shape)

    def bring_by_rows(self, name: str, bring: BringRows) -> None:
        """Have some rows of a frozen parameter come at a time, until its unit, which is bound to the rest, is released."""
        parameter = nn.Parameter(self._meta[name].detach(), requires_grad=False)
        setattr(parameter, _COMING, bring)
        self._place(name, parameter)

    def release(self, unit: int) -> None:
        """Put the parameters of `unit` back on the meta device. Releasing an unbound unit does nothing."""
        for spec in self._layouts[unit].parameters:
            self._place(spec.name, self._meta[spec.name])
        self._bound.discard(unit)

    def require(self, *units: int) -> None:
        """Raise `StepFailed` unless all `units` are bound."""
        for unit in units:
            if unit not in self._bound:
                raise StepFailed(
                    f"unit {unit} ({self._layouts[unit].name}) is used, but not bound; bound are {sorted(self._bound)}: "
                    "fetch and bind it first"
                )

    def _place(self, name: str, parameter: Any) -> None:
        for module, attribute in self._owners[name]:
            if isinstance(parameter, nn.Parameter):
                module._parameters[attribute] = parameter
                module.__dict__.pop(attribute, None)
            else:
                module.__dict__[attribute] = parameter


def by_wholes(sink: GradientSink) -> RowSink:
    """Return what takes gradients of rows for a `sink` of whole ones."""

    def take(spec: ParameterSpec, gradient: torch.Tensor, start: int) -> None:
        whole = gradient.new_zeros(spec.num_elements)
        whole[start : start + gradient.numel()] = gradient.flatten()
        sink(spec, whole.view(spec.shape))

    return take


def hand_over_rows(parameter: nn.Parameter, start: int, gradient: torch.Tensor) -> None:
    """Give the gradient of the rows of `parameter` from `start` on to whoever takes them, or add it to the gradient there."""
    take = getattr(parameter, _ROWS, None)
    if take is not None:
        take(gradient, start * parameter[0].numel())
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad[start : start + len(gradient)] += gradient


def come_by_rows(parameter: nn.Parameter) -> bool:
    """Return whether only some rows of a parameter are there at a time."""
    return hasattr(parameter, _COMING)


def rows_there(parameter: nn.Parameter, start: int, stop: int) -> torch.Tensor:
    """Return rows `start` to `stop` of a parameter: where they are, or once they have come."""
    bring: BringRows | None = getattr(parameter, _COMING, None)
    return parameter.detach()[start:stop] if bring is None else bring(start, stop)


def parameter_owners(model: nn.Module) -> Mapping[str, Sequence[tuple[nn.Module, str]]]:
    """Return for each parameter the modules and attributes that hold it; tied parameters are one, under their first name."""
    owners: dict[str, list[tuple[nn.Module, str]]] = {}
    names: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                name = names.setdefault(id(parameter), f"{module_name}.{attribute}" if module_name else attribute)
                owners.setdefault(name, []).append((module, attribute))
    return owners


def parameter_aliases(model: nn.Module) -> dict[str, str]:
    """Return for each name of each parameter its first name, which is the one in the layouts."""
    names: dict[int, str] = {}
    return {name: names.setdefault(id(parameter), name) for name, parameter in model.named_parameters(remove_duplicate=False)}


def is_tied(model: Any) -> bool:
    """Return whether the input embedding and the head of a model of transformers are one parameter."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return head is not None and embedding.weight is head.weight


def hand_over(spec: ParameterSpec, sink: GradientSink) -> Callable[[Any], None]:
    """Return a hook that gives a parameter's gradient to `sink`, and keeps none."""

    def hook(parameter: Any) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:  # a product that was put in place of the model's own may give none
            sink(spec, gradient)

    return hook
