"""A table of rows beside a feed-forward part: product keys choose a few rows for each token, and their weighted sum is added.

This file needs torch and safetensors alone. It lies beside every table that is saved, and `load` brings that to a model.

The input x of the feed-forward part, of d numbers, has two halves. Each half is compared with n half keys. Row i n + j, of n n
rows, scores x[:d/2] . keys[0, i] + x[d/2:] . keys[1, j]. The best `top` rows are weighted by the softmax of their scores
(product keys: Lample et al. 2019; the place: MEFT, Hao et al. 2024). All is computed in the dtype of the table.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
KEYS, VALUES = "table.keys", "table.values"


def look_up(inputs: Tensor, keys: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the rows (N, top) that inputs (N, d) choose by half keys (2, n, d/2), and their weights; best first."""
    side, half = keys.shape[1:]
    scores = [inputs[:, :half] @ keys[0].T, inputs[:, half:] @ keys[1].T]
    # The best `top` of all sums are among the sums of the best `top` of each half.
    (first, rows), (second, columns) = (each.topk(min(top, side)) for each in scores)
    best, places = (first[:, :, None] + second[:, None, :]).flatten(1).topk(top)
    ids = rows.gather(1, places // second.shape[1]) * side + columns.gather(1, places % second.shape[1])
    return ids, best.softmax(dim=1)


class WeightedRows(torch.autograd.Function):
    """The weighted sums of rows. A row's gradient is summed in the order of tokens, whatever the threads and the device."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return (N, d): for each token the sum of its rows of `values` (rows, d), `ids` and `weights` being (N, top)."""
        ctx.save_for_backward(values, ids, weights)
        return F.embedding_bag(ids, values, per_sample_weights=weights, mode="sum")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, Tensor | None]:
        """Return the gradients of values and weights: a row's is the weighted sum of the gradients of its tokens."""
        (gradient,), (values, ids, weights) = gradients, ctx.saved_tensors
        of_values = of_weights = None
        if ctx.needs_input_grad[0]:
            flat = ids.flatten()
            order = flat.argsort(stable=True)
            starts = torch.searchsorted(flat[order], torch.arange(len(values), device=flat.device))
            tokens, factors = order // ids.shape[1], weights.flatten()[order]
            of_values = F.embedding_bag(tokens, gradient, starts, per_sample_weights=factors, mode="sum")
        if ctx.needs_input_grad[2]:
            starts = torch.arange(0, ids.numel(), ids.shape[1], device=ids.device)
            tokens = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
            found = torch.ops.aten._embedding_bag_per_sample_weights_backward(
                gradient.contiguous(), values, ids.flatten(), starts, tokens, mode=0
            )
            of_weights = found.view_as(weights)
        return of_values, None, of_weights


def different_rows(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return which of so many `rows` are among `ids`, ascending, and where each of `ids` is in that list.

    What it allocates follows from the shapes alone, and so does the most that there may be.
    """
    flat = ids.flatten()
    if rows <= flat.numel():
        among = torch.zeros(rows, dtype=torch.bool, device=ids.device)
        among[flat] = True
        return among.nonzero()[:, 0], (among.cumsum(0) - 1)[flat].view_as(ids)
    ordered, order = flat.sort()
    first = torch.cat([ordered.new_ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]])
    places = torch.empty_like(order)
    places[order] = first.cumsum(0) - 1
    return ordered[first.nonzero()[:, 0]], places.view_as(ids)


def table_output(inputs: Tensor, keys: Tensor, values: Tensor, top: int) -> Tensor:
    """Return what a table adds to the output of a feed-forward part, for its inputs (..., d)."""
    flat = inputs.reshape(-1, inputs.shape[-1]).to(keys.dtype)
    found: Tensor = WeightedRows.apply(values, *look_up(flat, keys, top))  # type: ignore[no-untyped-call]
    return found.view(inputs.shape)


def added(output: Any, more: Tensor) -> Any:
    """Return the output of a feed-forward part, alone or the first of several, with `more` added."""
    if isinstance(output, tuple):
        return (added(output[0], more), *output[1:])
    return (output + more.view(output.shape)).to(output.dtype)


class RowTable(nn.Module):
    """A table as a module: its forward takes the feed-forward part's input, and returns what is added to its output."""

    def __init__(self, keys: Tensor, values: Tensor, top: int) -> None:
        super().__init__()
        self.keys, self.values, self.top = nn.Parameter(keys), nn.Parameter(values), top

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (..., d) for inputs (..., d)."""
        return table_output(inputs, self.keys, self.values, self.top)


def load(model: nn.Module, directory: str | Path) -> nn.Module:
    """Give a model of transformers the tables saved in `directory`; return it. Its feed-forward parts then have a `table`."""
    from safetensors.torch import load_file

    top = json.loads((Path(directory) / CONFIG_NAME).read_text(encoding="utf-8"))["top"]
    tensors = load_file(Path(directory) / WEIGHTS_NAME)
    for name in [key.removesuffix(f".{KEYS}") for key in tensors if key.endswith(f".{KEYS}")]:
        part = model.get_submodule(name)
        table = RowTable(tensors[f"{name}.{KEYS}"], tensors[f"{name}.{VALUES}"], top)
        part.add_module("table", table.to(next(part.parameters()).device))

        def add(module: Any, args: tuple[Any, ...], output: Any) -> Any:
            return added(output, module.table(args[0]))

        part.register_forward_hook(add)
    return model
