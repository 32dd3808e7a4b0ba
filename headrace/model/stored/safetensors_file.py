"""Read safetensors files: the header, and tensors by offset in bounded pieces.

It is parsed here (8 bytes of length, JSON, data), because nothing of a file may stay mapped or cached. A memory map of a 350 GB
model counts as resident memory when it is touched. Invariant: a tensor is only described if the file holds all of its bytes.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.files.model_directory import is_lfs_pointer
from headrace.terms.errors import ModelError, shortened
from headrace.terms.json_text import parse_json
from headrace.terms.sizes import MIB, format_bytes

# safetensors name -> bytes per element; names that are not here have unknown size and are refused.
_ELEMENT_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
# The dtypes in which weights may be stored, and the NumPy dtypes that hold the bits.
WEIGHT_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
# The same for integers: some architectures have tables of them among their buffers.
INTEGER_DTYPES: dict[str, np.dtype[Any]] = {
    **{f"{kind}{bits}": np.dtype(f"{kind.lower()}{bits // 8}") for kind in "IU" for bits in (8, 16, 32, 64)},
    "BOOL": np.dtype(np.bool_),
}
ROW_DTYPES = WEIGHT_DTYPES | INTEGER_DTYPES
# The page cache keeps files in folios, which are at most as large as a huge page.
_LARGEST_FOLIO_BYTES = 2 * MIB
_LARGEST_HEADER_BYTES = 100 * MIB  # the limit of the safetensors library
PIECE_BYTES = 4 * MIB


class RowSource(Protocol):
    """Makes the rows of a tensor that does not lie in a file in its final form."""

    def read_rows(self, piece_bytes: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield as `read_tensor_rows` does."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: `num_bytes` bytes from `offset` of `path`, row-major; `dtype` is the safetensors name.

    Where the weight is `coded`, that makes its rows: `num_bytes` counts the result, and `path` is the file of its first part.
    """

    key: str
    path: Path
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    coded: RowSource | None = field(default=None, repr=False, compare=False)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name.

    Raises:
        ModelError: the file is missing, is no safetensors file, is truncated, or has bytes that belong to no tensor.
    """
    try:
        found_bytes = path.stat().st_size
        with os.fdopen(_open_without_read_ahead(path), "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if found_bytes < 8 or header_bytes > min(found_bytes - 8, _LARGEST_HEADER_BYTES):
                if is_lfs_pointer(path):
                    raise ModelError(f"{path}: a git-lfs pointer, not the weights; fetch them with `git lfs pull`")
                raise ModelError(
                    f"{path}: expected a safetensors file, found {found_bytes} bytes that begin with a header length of "
                    f"{header_bytes}. The file is truncated or of another kind: fetch it again"
                )
            header = parse_json(file.read(header_bytes))
    except OSError as error:
        raise ModelError(f"{path}: cannot read weights: {error.strerror}") from error
    except ValueError as error:
        raise error if isinstance(error, ModelError) else ModelError(f"{path}: its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: expected a JSON object as header, found {type(header).__name__}")
    start = 8 + header_bytes
    tensors = {key: _describe(path, key, entry, start) for key, entry in header.items() if key != "__metadata__"}
    expected_bytes = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=start)
    if expected_bytes != found_bytes:
        raise ModelError(
            f"{path}: its header asks for {expected_bytes} bytes ({format_bytes(expected_bytes)}), "
            f"found {found_bytes} ({format_bytes(found_bytes)}); fetch the file again"
        )
    return tensors


def _describe(path: Path, key: str, entry: Any, start: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise ValueError("expected whole numbers")
        expected_bytes = math.prod(shape) * _ELEMENT_BYTES[dtype]
    except (KeyError, TypeError, ValueError) as error:
        words = shortened(repr(entry))
        raise ModelError(f"{path}: tensor {key} has a header entry that is not understood: {words}") from error
    if end - begin != expected_bytes:
        raise ModelError(f"{path}: tensor {key} ({dtype} {shape}) needs {expected_bytes} bytes, its entry holds {end - begin}")
    return StoredTensor(key, path, start + begin, expected_bytes, dtype, shape)


def read_tensor_rows(tensor: StoredTensor, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield `(start, stop, rows)` over the first dimension of a tensor of `ROW_DTYPES`, about `piece_bytes` at a time.

    `rows` holds the bits (bfloat16 as uint16) in the tensor's shape; it is overwritten by the next piece. Pages read are
    dropped from the page cache: each byte of a checkpoint is read once.
    """
    if tensor.coded is not None:
        yield from tensor.coded.read_rows(piece_bytes)
        return
    dtype = ROW_DTYPES[tensor.dtype]
    shape = tensor.shape or (1,)
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    rows_per_piece = max(1, min(shape[0], piece_bytes // max(1, row_bytes)))
    buffer = np.empty((rows_per_piece, *shape[1:]), dtype)
    descriptor = _open_without_read_ahead(tensor.path)
    try:
        for start in range(0, shape[0], rows_per_piece):
            stop = min(start + rows_per_piece, shape[0])
            rows = buffer[: stop - start]
            _read_into(descriptor, tensor, tensor.offset + start * row_bytes, rows)
            yield start, stop, rows
    finally:
        os.close(descriptor)


def read_bytes(tensor: StoredTensor, piece_bytes: int = PIECE_BYTES) -> Iterator[np.ndarray]:
    """Yield the bytes of a tensor of any dtype, a piece at a time."""
    if tensor.coded is not None:
        yield from (np.ascontiguousarray(rows).reshape(-1).view(np.uint8) for _, _, rows in tensor.coded.read_rows(piece_bytes))
        return
    buffer = np.empty(min(piece_bytes, max(1, tensor.num_bytes)), np.uint8)
    descriptor = _open_without_read_ahead(tensor.path)
    try:
        for start in range(0, tensor.num_bytes, piece_bytes):
            piece = buffer[: min(piece_bytes, tensor.num_bytes - start)]
            _read_into(descriptor, tensor, tensor.offset + start, piece)
            yield piece
    finally:
        os.close(descriptor)


def _open_without_read_ahead(path: Path) -> int:
    """Open a file without reading ahead: what the kernel reads beyond a tensor would stay in its cache.

    Headers are read so, too: a page that one read ahead bears a mark, and reading that later makes the kernel read further on.
    """
    descriptor = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _read_into(descriptor: int, tensor: StoredTensor, offset: int, out: np.ndarray) -> None:
    """Fill `out` from the file, in as many calls as that takes, and drop the pages read from the page cache."""
    view = memoryview(out.reshape(-1).view(np.uint8).data)
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise ModelError(
                f"{tensor.path}: tensor {tensor.key}: wanted {len(view)} bytes at {offset}, found {done}; the file shrank"
            )
        done += count
    if hasattr(os, "posix_fadvise"):
        # A folio leaves the cache if it lies in the range as a whole: those across a border go with the later of two pieces.
        start = max(0, offset - _LARGEST_FOLIO_BYTES)
        stop = offset + len(view) + _LARGEST_FOLIO_BYTES
        os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)
