"""A compressed model as files: one for each block, one for everything outside of blocks; and what its configuration says.

Invariant: a file that has its final name is whole. Tensors that are not coded have the bytes that they came with.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace.codec.targets import Target, is_dictionary_table
from headrace.files.durable import sync, write_whole
from headrace.model import Chain, WeightMap
from headrace.model.blocks.text_part import names_in_whole
from headrace.model.directory.matching import Conversion, read_whole, run_conversion
from headrace.model.stored.safetensors_file import StoredTensor, read_bytes, read_header
from headrace.model.stored.shard_writer import ShardWriter
from headrace.model.written.export import copy_files, stored_keys

_INDEX = "model.safetensors.index.json"
_DTYPES = {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
}
_DIGEST_BYTES = 16
Written = torch.Tensor | StoredTensor  # a part in memory, or one that lies in another file


class CodedFiles:
    """Writes the files of a compressed model into `folder`, in any order; `finish` adds what makes them a model directory."""

    def __init__(self, folder: Path, weights: WeightMap, chain: Chain, *, joined: bool = False) -> None:
        """`joined`: whether plain weights that transformers joins as it reads (experts, convolutions) are written joined.
        Transformers drops single ones where others may be coded.
        """
        self.folder, self._weights = folder, weights
        self._joined = _joined_of(weights) if joined else {}
        self._blocks = chain.num_blocks
        of_blocks = [[key for _, key in stored_keys(weights, layout)] for layout in chain.layouts[1 : chain.num_blocks + 1]]
        inside = {key for keys in of_blocks for key in keys}
        self._keys = [[key for key in weights.checkpoint.tensors if key not in inside], *of_blocks]

    def keys(self, unit: int) -> Sequence[str]:
        """Return the stored names of the tensors in the file of `unit`."""
        return self._keys[unit]

    def name(self, unit: int) -> str:
        """Return the name of the file of a block (unit 1 and on), or of the rest (unit 0)."""
        return f"model-{unit + 1:05d}-of-{self._blocks + 1:05d}.safetensors"

    def write(self, unit: int, parts: Mapping[str, Mapping[str, Written]]) -> str:
        """Write the file of `unit`, with `parts` in the place of the tensors that have their names; return its digest."""
        beside = self.folder / f"unit-{unit}.new"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        tensors = self._weights.checkpoint.tensors
        order: list[tuple[StoredTensor, Callable[[], Iterable[np.ndarray]]]] = []
        for key in self._keys[unit]:
            if key in parts:
                names = {
                    name: f"{name}.{unit}" if is_dictionary_table(name) else key + name.removeprefix("weight")
                    for name in parts[key]
                }
                known = {stored.key for stored, _ in order}  # a table is written once, however many matrices need it
                for name, part in parts[key].items():
                    if names[name] not in known:
                        order.append(_written(names[name], part))
            elif (joined := self._joined.get(key)) is None:
                order.append((tensors[key], partial(read_bytes, tensors[key])))
            elif key == joined[0].keys[0]:
                order += [(each.described(tensors), partial(each.read, self._weights)) for each in joined]
        writer = ShardWriter(beside, [[stored for stored, _ in order]] if order else [])
        try:
            for stored, read in order:
                writer.write(stored.key, read())
            writer.finish()
        finally:
            writer.close()
        place = self.folder / self.name(unit)
        (beside / "model.safetensors").replace(place)
        beside.rmdir()
        sync(self.folder)
        return file_digest(place)

    def finish(self, config: Mapping[str, Any], notes: Mapping[str, str]) -> None:
        """Write the index, the configuration (with `config` added), the files that the model came with, and `notes`."""
        mapping: dict[str, str] = {}
        total = 0
        for unit in range(self._blocks + 1):
            for key, stored in read_header(self.folder / self.name(unit)).items():
                mapping[key] = self.name(unit)
                total += stored.num_bytes
        source = self._weights.checkpoint.directory
        copy_files(source, self.folder)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(mapping.items()))}, indent=2)
        write_whole(self.folder / _INDEX, text + "\n")
        original = json.loads((source / "config.json").read_text(encoding="utf-8"))
        write_whole(self.folder / "config.json", json.dumps(original | dict(config), indent=2) + "\n")
        for name, note in notes.items():
            write_whole(self.folder / name, note)


@dataclass(frozen=True, slots=True)
class _Joined:
    """A tensor that transformers makes of several stored ones: its `name` in the model, and their `keys`.

    `conversion` makes it; without one, it is what they are one after another.
    """

    name: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    conversion: Conversion | None = None

    def described(self, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
        """Return the tensor as a file has it."""
        first = tensors[self.keys[0]]
        num_bytes = first.num_bytes // math.prod(first.shape) * math.prod(self.shape)
        return StoredTensor(self.name, Path(), 0, num_bytes, first.dtype, self.shape)

    def read(self, weights: WeightMap) -> Iterable[np.ndarray]:
        """Return its bytes."""
        tensors = weights.checkpoint.tensors
        if self.conversion is None:
            return (piece for key in self.keys for piece in read_bytes(tensors[key]))
        made = run_conversion(self.conversion, weights.stored_model, lambda key: read_whole(tensors[key]))
        return _pieces_of(made[self.name])


def _joined_of(weights: WeightMap) -> dict[str, list[_Joined]]:
    """Return what transformers joins as it reads weights, by each of the stored names."""
    model, stored, tensors = weights.model, weights.stored_model, weights.checkpoint.tensors
    names = {name: name for name in model.state_dict()} if stored is model else names_in_whole(model, stored)
    shapes, found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, list[list[_Joined]]()
    for name, own in names.items():
        pieces = weights.pieces.get(own, ())
        if len(pieces) > 1:
            ordered = sorted(pieces, key=lambda piece: (piece.index[0], piece.index[1].start))  # type: ignore[union-attr]
            found.append([_Joined(name, tuple(piece.key for piece in ordered), shapes[own])])
    for conversion in weights.conversions:
        keys = tuple(key for several in conversion.sources.values() for key in several)
        if all(key.endswith(".weight") for key in keys):
            pairs = zip(conversion.made, conversion.parameters, strict=True)
            found.append([_Joined(name, keys, shapes[own], conversion) for name, own in pairs])
    alike = [each for each in found if len({tensors[key].dtype for key in each[0].keys}) == 1]
    return {key: each for each in alike for key in each[0].keys}


def file_digest(path: Path) -> str:
    """Return the digest of a file: BLAKE2b of 128 bits, hexadecimal."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def quantisation_config(
    weights: WeightMap, target: Target, groups: Mapping[str, int], *, decodes_at_load: bool = False
) -> dict[str, Any]:
    """Return what `config.json` says about coded parameters; `groups` has the columns of a group by parameter.

    `decodes_at_load`: whether transformers decodes matrices while it reads the files, not in its first forward pass.
    """
    model, stored = weights.model, weights.stored_model
    names = {name: name for name in model.state_dict()} if stored is model else names_in_whole(model, stored)
    coded = {
        name.removesuffix(".weight"): groups[own] for name, own in names.items() if own in groups and name.endswith(".weight")
    }
    experts = {groups[own] for own in groups if not own.endswith(".weight")}
    linear = [name for name, module in stored.named_modules() if isinstance(module, nn.Linear)]
    left = {name for name in linear if name not in coded} | set(_left_in_files(weights, groups))
    if experts:  # all of them have one size
        coded["re:.*experts.*"] = min(experts)
    return target.describe(coded, sorted(left)) | ({"dequantize": True} if decodes_at_load else {})


def _left_in_files(weights: WeightMap, groups: Mapping[str, int]) -> Sequence[str]:
    """Return the stored names of matrices that are not coded: other readers have modules of those names."""
    pieces = [(name, piece.key) for name, found in weights.pieces.items() for piece in found]
    tensors = weights.checkpoint.tensors
    return [
        key.removesuffix(".weight")
        for name, key in pieces
        if name not in groups and len(tensors[key].shape) == 2 and key.endswith(".weight")
    ]


def _written(key: str, part: Written) -> tuple[StoredTensor, Callable[[], Iterable[np.ndarray]]]:
    """Return what a file says of a part, and what reads its bytes."""
    if isinstance(part, StoredTensor):
        return replace(part, key=key), partial(read_bytes, part)
    return _described(key, part), partial(_pieces_of, part)


class Spool:
    """A file that takes the parts of large units until they are written in their order. A context manager; it is removed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "Spool":
        self._file = self._path.open("wb")
        return self

    def __exit__(self, *failure: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def put(self, key: str, tensor: torch.Tensor) -> StoredTensor:
        """Take a tensor, and return where it lies."""
        placed = replace(_described(key, tensor), path=self._path, offset=self._file.tell())
        for piece in _pieces_of(tensor):
            self._file.write(piece.data)
        self._file.flush()
        return placed


def _described(key: str, tensor: torch.Tensor) -> StoredTensor:
    num_bytes = tensor.numel() * tensor.element_size()
    return StoredTensor(key, Path(), 0, num_bytes, _DTYPES[tensor.dtype], tuple(tensor.shape))


def _pieces_of(tensor: torch.Tensor) -> list[np.ndarray]:
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy()]
