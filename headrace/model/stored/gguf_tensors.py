"""The tensors of a GGUF file, as its model directory lists them (`gguf_directory`): stored tensors like those of safetensors.

Invariant: tensors lie where the table says as long as the file has the size that it had; a file that was replaced is another
directory.
"""

from math import prod
from pathlib import Path
from typing import Any

import torch

from headrace.codec.published.gguf_blocks import BLOCKS, GgufBlocks
from headrace.files.model_directory import GGUF_TABLE
from headrace.model.stored.coded_source import CodedSource
from headrace.model.stored.safetensors_file import StoredTensor
from headrace.terms.coding import as_matrix
from headrace.terms.errors import ModelError
from headrace.terms.json_text import parse_json

TABLE = GGUF_TABLE
PLAIN = ("F16", "BF16", "F32")


def is_gguf_directory(directory: Path) -> bool:
    """Return whether the weights of a model directory lie in a GGUF file."""
    return (directory / TABLE).is_file()


def gguf_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the GGUF file by their names in the model.

    Raises:
        ModelError: the file is gone, or another one, or the table is damaged.
    """
    path = directory / TABLE
    try:
        table = parse_json(path.read_text(encoding="utf-8"))
        file, size = Path(table["file"]), int(table["num_bytes"])
        tensors = {str(entry["name"]): _stored(file, entry) for entry in table["tensors"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: cannot be read; remove {directory}, and give the GGUF file again") from error
    try:
        found = file.stat().st_size
    except OSError as error:
        raise ModelError(f"{file}: the weights of {directory} are gone ({error.strerror}); put the file back") from error
    if found != size:
        raise ModelError(f"{file}: it had {size} bytes, and has {found}; give the GGUF file again")
    return tensors


def _stored(file: Path, entry: dict[str, Any]) -> StoredTensor:
    name, kind, shape, order = str(entry["name"]), str(entry["kind"]), tuple(entry["shape"]), entry["order"]
    place = name, file, int(entry["offset"]), int(entry["num_bytes"])
    if kind in PLAIN and not order:
        return StoredTensor(*place, kind, shape)
    (rows, columns), block = as_matrix(shape), BLOCKS[kind]
    blocks = StoredTensor(*place, "U8", (rows, columns // block.numbers * block.num_bytes))
    given = {"order": _rows(order, shape)} if order else {}
    dtype = kind if kind in PLAIN else "F32"
    source = CodedSource(GgufBlocks(kind, bool(order)), shape, dtype, {"blocks": blocks}, given)
    size = getattr(torch, "float32" if dtype == "F32" else "bfloat16").itemsize
    return StoredTensor(name, file, place[2], prod(shape) * size, dtype, shape, source)


def _rows(order: list[int], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the rows of the matrix in the order of the model; an entry of the first dimension may be several of them."""
    each = as_matrix(shape)[0] // shape[0]
    first = torch.tensor(order, dtype=torch.int32)[:, None] * each
    return (first + torch.arange(each, dtype=torch.int32)).flatten()
