"""Whether tables in the blocks of an architecture can be read, and trained, by rows: tried on a tiny instance."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.model.by_rows.learned_rows import LearnedRows
from headrace.model.parts.stored_rows import StoredRows
from headrace.model.trials.instance import tiny_samples
from headrace.model.trials.probe import tiny_runner
from headrace.model.trials.thresholds import architecture_key
from headrace.terms.errors import in_one_line
from headrace.terms.layout import lay_out


def why_whole_tables(config: Any) -> str:
    """Return why tables of the architecture of `config` come with their block; "" where their rows can be read."""
    return _table_check(cast(Hashable, type(config)), architecture_key(config))


def why_not_trained(config: Any) -> str:
    """Return why tables of the architecture of `config` cannot be trained by rows; "" where they can."""
    return _training_check(cast(Hashable, type(config)), architecture_key(config))


def is_table(module: nn.Module) -> bool:
    """Return whether a module is a plain table, and nothing is computed beside it."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Embedding and module.max_norm is None and not hooked


def holder_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds the module of a parameter, and by which attribute."""
    outer, _, attribute = name.rpartition(".")[0].rpartition(".")
    return model.get_submodule(outer), attribute


@lru_cache(maxsize=64)
def _table_check(config_class: type, key: str) -> str:
    model, names = _tried_model(config_class, key)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return _differs(model, lambda: _try_rows(model, names))


@lru_cache(maxsize=64)
def _training_check(config_class: type, key: str) -> str:
    model, names = _tried_model(config_class, key)
    return _differs(model, lambda: _try_training(model, names))


def _tried_model(config_class: type, key: str) -> tuple[Any, list[str]]:
    """Return a tiny instance, and the names of tables in its blocks."""
    runner = tiny_runner(config_class, key)
    inside = {id(module) for block in runner.blocks for module in block.modules() if is_table(module)}
    return runner.model, [f"{name}.weight" for name, module in runner.model.named_modules() if id(module) in inside]


def _differs(model: Any, change: Callable[[], "dict[str, _TriedSource]"]) -> str:
    """Return why a model's results differ after a change, which returns what gets gradients by rows, by parameter; "" if they
    do not.
    """
    samples = tiny_samples(model)
    try:
        expected = [_results(model, sample.input_ids, {}) for sample in samples]
        sources = change()
        made = [_results(model, sample.input_ids, sources) for sample in samples]
    except Exception as error:  # whatever code raises that reads the weight itself
        return in_one_line(error)
    for one, other in zip(expected, made, strict=True):
        if one.keys() != other.keys() or not all(torch.equal(one[name], other[name]) for name in one):
            return "its results differ where rows of tables are read"
    return ""


def _try_rows(model: nn.Module, names: Sequence[str]) -> "dict[str, _TriedSource]":
    for name in names:
        parent, attribute = holder_of(model, name)
        parent._modules[attribute] = _TriedRows(cast(nn.Embedding, parent._modules[attribute]))
    return {}


def _try_training(model: nn.Module, names: Sequence[str]) -> "dict[str, _TriedSource]":
    sources = dict[str, _TriedSource]()
    for name in names:
        parent, attribute = holder_of(model, name)
        table = cast(nn.Embedding, parent._modules[attribute])
        rows = LearnedRows(table, table.weight.dtype, lay_out("", []), lambda: None)
        sources[name] = _TriedSource(table.weight.detach())
        rows.serve(sources[name])
        parent._modules[attribute] = rows
    return sources


class _TriedSource:
    """Rows of a table in memory, and the sum of their gradients; None where there is none."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._gathered = numbers.numpy(), 0
        self._sums: Tensor | None = None

    def gather(self, unit: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `RowSource`."""
        self._gathered += 1
        if self._gathered > 1:  # torch would add the gradients of both in the dtype of compute
            raise ValueError("a pass asks a table for rows twice")
        found: NDArray[np.float32] = self._numbers[ids]
        return found

    def add(self, unit: int, ids: NDArray[np.int64], gradient: NDArray[np.float32]) -> None:
        """See `RowSource`."""
        self._sums = torch.zeros(self._numbers.shape, dtype=torch.float32)
        self._sums[torch.from_numpy(ids)] = torch.from_numpy(gradient)

    def taken(self) -> Tensor | None:
        """Return the gradients of a pass, and forget it."""
        sums, self._sums, self._gathered = self._sums, None, 0
        return sums


class _TriedRows(StoredRows):
    """Rows of a table in memory. The weight that other code finds has no numbers."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__(table, None, table.weight.dtype, lay_out("", []), lambda: None)
        self._numbers, self._weight = self._weight, self._weight.to("meta")

    @property
    def _has_numbers(self) -> bool:
        return True

    def _looked_up(self, wanted: Tensor, places: Tensor, device: torch.device) -> Tensor:
        return self._numbers[wanted][places.view(-1)].view(*places.shape, -1).to(device)


def _results(model: Any, ids: Tensor, sources: Mapping[str, _TriedSource]) -> dict[str, Tensor]:
    """Return the logits of a row, and the gradients of all that has one; those of tables in `sources` are there."""
    out = model(input_ids=ids, use_cache=False).logits
    out.backward(torch.cos(out.detach()))
    found = {"": out.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    return found | {name: sums for name, source in sources.items() if (sums := source.taken()) is not None}
