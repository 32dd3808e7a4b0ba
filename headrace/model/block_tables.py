"""Tables within blocks, such as an embedding of n-grams, whose rows stay in the file: a block reads those that it asks for.

A table is an embedding in a block that nothing else uses; that is tried on a tiny instance. A pass asks for few of its rows, so
its block comes without it. Invariant: hidden states have the bits of the whole table (`stored_rows`).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate

from headrace.model.binding import parameter_owners
from headrace.model.chain import Chain
from headrace.model.instance import tiny_samples
from headrace.model.matching import WeightMap
from headrace.model.probe import tiny_runner
from headrace.model.safetensors_file import StoredTensor
from headrace.model.stored_experts import without
from headrace.model.stored_rows import ROW_DTYPES, StoredRows, rows_within
from headrace.model.thresholds import architecture_key
from headrace.terms.embedding_rows import BlockRows, EmbeddingRows
from headrace.terms.errors import in_one_line
from headrace.terms.layout import lay_out
from headrace.terms.sizes import GIB

# From so many bytes on, in the dtype of compute, a table never comes with its block. To read so much of a drive takes as long
# as the rows of some 20,000 tokens (docs/log/embedding-rows).
LEAST_BYTES = GIB


@dataclass(frozen=True, slots=True)
class BlockTable:
    """An embedding in the block of `unit`, whose weight is the parameter `name`, (rows, width) in the dtype of compute.

    `stored` says where its rows lie (see `RowReader`); None: no files were asked.
    """

    unit: int
    name: str
    figures: EmbeddingRows
    stored: tuple[StoredTensor, ...] | None


@dataclass(frozen=True)
class TakenTables:
    """Tables that are out of the units of a chain; `rows` stand in their places."""

    tables: tuple[BlockTable, ...] = ()
    rows: tuple[StoredRows, ...] = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files in which they lie."""
        return tuple(dict.fromkeys(part.path for each in self.tables for part in each.stored or ()))

    @property
    def bytes_read(self) -> int:
        """Bytes of rows that were read so far."""
        return sum(rows.bytes_read for rows in self.rows)


def is_large(table: BlockTable) -> bool:
    """Return whether a table stays in its file wherever that is possible: a pass would rather read a few of its rows."""
    return table.figures.whole_bytes >= LEAST_BYTES


def tables_of(chain: Chain, weights: WeightMap | None) -> tuple[BlockTable, ...]:
    """Return the tables in blocks of a chain, whose rows are stored one after another; without `weights` no files are asked.

    There are none where blocks do not run by the model's own code, or a tiny instance had other bits with rows.
    """
    owners, found = parameter_owners(chain.model), list[BlockTable]()
    for unit, layout in enumerate(chain.layouts[1 : chain.num_blocks + 1], start=1) if chain.replayable else ():
        for spec in layout.parameters:
            (module, _), *others = owners[spec.name]
            if others or not _is_table(module):
                continue
            stored = None if weights is None else _stored(weights, spec.name)
            if stored is not None and not stored:
                continue
            rows, width = spec.shape
            dtype = ROW_DTYPES[stored[0].dtype] if stored else chain.dtype
            stored_bytes, computed_bytes = width * dtype.itemsize, width * chain.dtype.itemsize
            figures = EmbeddingRows(rows=rows, stored_bytes=stored_bytes, computed_bytes=computed_bytes)
            found.append(BlockTable(unit, spec.name, figures, stored))
    return () if not found or why_whole_tables(chain.config) else tuple(found)


def take_tables(chain: Chain, tables: Sequence[BlockTable]) -> TakenTables:
    """Read the rows of `tables` as blocks ask for them, from here on: units are without them. Nothing is bound."""
    return TakenTables(tuple(tables), tuple(_taken(chain, each) for each in tables))


def by_rows(chain: Chain) -> tuple[BlockRows, ...]:
    """Return the tables in blocks of a chain that are read by rows; how many a token asks for is left open."""
    blocks = enumerate(chain.runner.blocks, start=1)
    return tuple(BlockRows(unit=unit, table=rows.figures) for unit, block in blocks for rows in rows_within(block))


def take_as(known: Chain, chain: Chain, weights: WeightMap | None) -> None:
    """Read by rows in `chain` what is so read in `known`, another chain of the model."""
    found = tables_of(chain, weights)
    places = [_place(known.model, table.name) for table in found]
    taken = [isinstance(parent._modules[attribute], StoredRows) for parent, attribute in places]
    take_tables(chain, [table for table, is_taken in zip(found, taken, strict=True) if is_taken])


def why_whole_tables(config: Any) -> str:
    """Return why tables of the architecture of `config` come with their block; "" where their rows can be read."""
    return _table_check(cast(Hashable, type(config)), architecture_key(config))


def _is_table(module: nn.Module) -> bool:
    """Return whether a module is a plain table, and nothing is computed beside it."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Embedding and module.max_norm is None and not hooked


def _taken(chain: Chain, table: BlockTable) -> StoredRows:
    """Put rows in the place of a table."""
    layouts, unit = chain.layouts, table.unit
    parent, attribute = _place(chain.model, table.name)
    module, whole = parent._modules[attribute], layouts[unit]
    assert isinstance(module, nn.Embedding), "it is a table"

    def taking_back() -> None:
        parent._modules[attribute] = module
        chain.lay_out((*chain.layouts[:unit], whole, *chain.layouts[unit + 1 :]))

    rows = StoredRows(module, table.stored, chain.dtype, whole, taking_back)
    parent._modules[attribute] = rows
    chain.lay_out((*layouts[:unit], without(whole, frozenset({table.name})), *layouts[unit + 1 :]))
    return rows


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds the module of a parameter, and by which attribute."""
    outer, _, attribute = name.rpartition(".")[0].rpartition(".")
    return model.get_submodule(outer), attribute


def _stored(weights: WeightMap, name: str) -> tuple[StoredTensor, ...]:
    """Return the stored tensors that a parameter is, one below the other; () if it is coded, or made in another way."""
    keys = [piece.key for piece in weights.pieces.get(name, ()) if piece.index == ()]
    for conversion in weights.conversions:
        joins = [type(each) is Concatenate and each.dim == 0 for each in conversion.converter.operations] == [True]
        if conversion.parameters == (name,) and joins and len(conversion.sources) == 1:
            keys = [key for several in conversion.sources.values() for key in several]
    found = tuple(weights.checkpoint.tensors[key] for key in keys)
    plain = all(each.coded is None and each.dtype in ROW_DTYPES and len(each.shape) == 2 for each in found)
    return found if plain and len({each.dtype for each in found}) == 1 else ()


@lru_cache(maxsize=64)
def _table_check(config_class: type, key: str) -> str:
    runner = tiny_runner(config_class, key)
    model = runner.model
    inside = {id(module) for block in runner.blocks for module in block.modules() if _is_table(module)}
    names = [f"{name}.weight" for name, module in model.named_modules() if id(module) in inside]
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    samples = tiny_samples(model)
    try:
        expected = [_results(model, sample.input_ids) for sample in samples]
        for name in names:
            parent, attribute = _place(model, name)
            parent._modules[attribute] = _TriedRows(cast(nn.Embedding, parent._modules[attribute]))
        made = [_results(model, sample.input_ids) for sample in samples]
    except Exception as error:  # whatever code raises that reads the weight itself
        return in_one_line(error)
    for one, other in zip(expected, made, strict=True):
        if one.keys() != other.keys() or not all(torch.equal(one[name], other[name]) for name in one):
            return "its results differ where rows of tables are read"
    return ""


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


def _results(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return the logits of a row, and the gradients of all that has one."""
    out = model(input_ids=ids, use_cache=False).logits
    out.backward(torch.cos(out.detach()))
    found = {"": out.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    return found
