"""Whether tables in the blocks of an architecture can be read, and trained, by rows: tried on a tiny instance."""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.model.by_rows.learned_rows import LearnedRows
from headrace.model.parts.runner import Runner
from headrace.model.parts.stored_rows import StoredRows
from headrace.model.trials.instance import tiny_samples
from headrace.model.trials.trial import run_back, tried, unless_alike, why_other
from headrace.terms.layout import lay_out


@tried
def why_whole_tables(runner: Runner) -> str:
    """Return why tables of an architecture come with their block; "" where their rows can be read."""
    for name in _tables(runner):
        runner.model.get_parameter(name).requires_grad_(False)
    return _why_other_by_rows(runner, _try_rows)


@tried
def why_not_trained(runner: Runner) -> str:
    """Return why tables of an architecture cannot be trained by rows; "" where they can."""
    return _why_other_by_rows(runner, _try_training)


def is_table(module: nn.Module) -> bool:
    """Return whether a module is a plain table, and nothing is computed beside it."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Embedding and module.max_norm is None and not hooked


def holder_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds the module of a parameter, and by which attribute."""
    outer, _, attribute = name.rpartition(".")[0].rpartition(".")
    return model.get_submodule(outer), attribute


def _tables(runner: Runner) -> list[str]:
    """Return the names of tables in the blocks of a tiny instance."""
    inside = {id(module) for block in runner.blocks for module in block.modules() if is_table(module)}
    return [f"{name}.weight" for name, module in runner.model.named_modules() if id(module) in inside]


def _why_other_by_rows(runner: Runner, change: "Callable[[nn.Module, Sequence[str]], dict[str, _TriedSource]]") -> str:
    """Return why results differ after a change, which returns what gets gradients by rows, by parameter; "" if they do not."""
    model, sources = runner.model, dict[str, _TriedSource]()

    def results() -> list[dict[str, Tensor]]:
        return [
            run_back(model, sample.input_ids)
            | {name: sums for name, source in sources.items() if (sums := source.taken()) is not None}
            for sample in tiny_samples(model)
        ]

    def changed() -> list[dict[str, Tensor]]:
        sources.update(change(model, _tables(runner)))
        return results()

    return why_other(results, changed, unless_alike("its results differ where rows of tables are read"))


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
