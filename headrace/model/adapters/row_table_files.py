"""Row tables in files: `adapter_config.json`, `adapter_model.safetensors`, and `row_table.py`, which loads them.

Invariant: what is written here gives the blocks' own logits, read by `row_table.load` or by `read_tables`.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.model.adapters import row_table
from headrace.model.adapters.adapter_config import CONFIG_NAME, read_adapter_json
from headrace.model.adapters.beside_files import WEIGHTS_NAME, write_beside
from headrace.model.adapters.row_table import KEYS, VALUES
from headrace.model.adapters.row_tables import RowTables
from headrace.model.blocks.beside import StoredBeside
from headrace.model.blocks.find_blocks import find_blocks
from headrace.model.blocks.text_part import names_in_whole
from headrace.model.chain.chain import Chain
from headrace.model.directory.matching import WeightMap
from headrace.terms.errors import ConfigError, ModelError
from headrace.terms.layout import part
from headrace.terms.options.row_table import Table

PEFT_TYPE = "ROW_TABLE"


def write_tables(
    out: Path, tables: RowTables, chain: Chain, weights: WeightMap, read: Callable[[int], Tensor], notes: Mapping[str, str]
) -> None:
    """Write a directory of tables, which appears whole or not at all. See `write_beside`."""
    names = _names_in_files(tables.places.values(), chain, weights)
    keys = {f"{name}.{end}": f"{place}.{end}" for name, place in names.items() for end in (KEYS, VALUES)}
    config = {"peft_type": PEFT_TYPE, "top": tables.settings.top, "base_model_name_or_path": str(weights.checkpoint.directory)}
    loader = Path(row_table.__file__)
    texts = {CONFIG_NAME: json.dumps(config, indent=2) + "\n", loader.name: loader.read_text(encoding="utf-8")}
    write_beside(out, tables, keys, weights, lambda unit: tables.tensors(unit, read(unit)), texts | dict(notes))


def read_tables(directory: Path, chain: Chain, weights: WeightMap) -> StoredBeside:
    """Read the tables in `directory` for the model of `chain`.

    Raises:
        ModelError: they cannot be read, or are of another model; the message says what differs.
    """
    top = read_adapter_json(directory).get("top")
    blocks = find_blocks(chain.model)
    modules = {
        f"{blocks.name}.{index}.{name}": index + 1
        for index, block in enumerate(blocks.modules)
        for name, _ in block.named_children()
    }
    ours = {place: name for name, place in _names_in_files(modules, chain, weights).items()}
    try:
        with safe_open(directory / f"{WEIGHTS_NAME}.safetensors", framework="pt") as file:
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{directory}: {WEIGHTS_NAME}.safetensors cannot be read: {error}") from error
    places = {key.removesuffix(f".{VALUES}") for key in found if key.endswith(f".{VALUES}")}
    model = type(chain.model).__name__
    for place in places:
        if place not in ours:
            raise ModelError(f"{directory}: {place} is no part of a block of {model}; give the model that it was trained on")
    shapes = {tuple(found[f"{place}.{VALUES}"].shape) for place in places}
    if len(shapes) != 1 or not isinstance(top, int):
        raise ModelError(f"{directory}: expected tables of one shape and their `top`, found {sorted(shapes)}, {top!r}")
    rows, width = next(iter(shapes))
    placed = {modules[ours[place]]: ours[place] for place in sorted(places, key=lambda place: modules[ours[place]])}
    try:
        tables = RowTables.over(chain.layouts, Table(rows=rows, top=top), placed, width)
    except ConfigError as error:
        raise ModelError(f"{directory}: {error}") from error
    stored = {f"{ours[place]}.{end}": found.get(f"{place}.{end}") for place in places for end in (KEYS, VALUES)}
    return StoredBeside(tables, {unit: _flat(directory, tables, unit, stored) for unit in tables.layouts})


def _flat(directory: Path, tables: RowTables, unit: int, stored: Mapping[str, Tensor | None]) -> Tensor:
    flat = torch.zeros(tables.layouts[unit].num_elements, dtype=torch.float32)
    for spec in tables.layouts[unit].parameters:
        tensor = stored[spec.name]
        if tensor is None or tuple(tensor.shape) != spec.shape:
            shape = None if tensor is None else tuple(tensor.shape)
            raise ModelError(f"{directory}: {spec.name}: expected shape {spec.shape}, found {shape}; the table is incomplete")
        part(flat, spec).copy_(tensor.flatten())
    return flat


def _names_in_files(modules: Iterable[str], chain: Chain, weights: WeightMap) -> dict[str, str]:
    """Return what `modules` are called in the stored model, by their names here; those without parameters are left out."""
    if weights.stored_model is chain.model:
        return {name: name for name in modules}
    inside = {own: whole for whole, own in names_in_whole(chain.model, weights.stored_model).items()}
    first = {name: next((own for own in inside if own.startswith(f"{name}.")), None) for name in modules}
    return {name: inside[own].removesuffix(own.removeprefix(name)) for name, own in first.items() if own is not None}
