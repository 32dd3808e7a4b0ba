"""Write safetensors shards of known contents, streaming.

Names, dtypes and shapes of all tensors are known beforehand, so headers are written first and data follows in order, a piece at
a time. Invariant: a file is complete only when every byte that its header promises has been written and synced.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from headrace.model.stored.safetensors_file import StoredTensor
from headrace.terms.errors import ModelError

_INDEX = "model.safetensors.index.json"


def plan_shards(tensors: Sequence[StoredTensor], shard_bytes: int) -> list[list[StoredTensor]]:
    """Cut `tensors`, in order, into shards of at most `shard_bytes` of data; a larger tensor gets a shard of its own."""
    shards: list[list[StoredTensor]] = []
    room = -1
    for tensor in tensors:
        if not shards or tensor.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def shard_file_bytes(shard: Sequence[StoredTensor]) -> int:
    """Return the size of the file of one shard."""
    return 8 + len(_header(shard)) + sum(tensor.num_bytes for tensor in shard)


def _header(shard: Sequence[StoredTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        entries[tensor.key] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)  # the format wants the data aligned to 8 bytes


class ShardWriter:
    """Writes the tensors of `shards` into `directory` in their order, with the index where there is more than one.

    Files are called after `name`.
    """

    def __init__(self, directory: Path, shards: Sequence[Sequence[StoredTensor]], name: str = "model") -> None:
        self._directory = directory
        count = len(shards)
        self._names = [
            f"{name}.safetensors" if count == 1 else f"{name}-{number:05d}-of-{count:05d}.safetensors"
            for number in range(1, count + 1)
        ]
        self._shards = [list(shard) for shard in shards]
        self._order = [(shard, tensor) for shard, tensors in enumerate(self._shards) for tensor in tensors]
        self._next = 0
        self._descriptor = -1

    def write(self, key: str, pieces: Iterable[np.ndarray]) -> None:
        """Write the next tensor, `key`, given as arrays whose bytes follow each other.

        Raises:
            ModelError: it is not this tensor's turn, or the pieces have another number of bytes than its header says.
        """
        shard, tensor = self._order[self._next]
        if tensor.key != key:
            raise ModelError(f"export: expected tensor {tensor.key} next, was given {key}")
        if tensor is self._shards[shard][0]:
            self._open(shard)
        written = 0
        for piece in pieces:
            data = memoryview(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            written += len(data)
            while data:
                data = data[os.write(self._descriptor, data) :]
        if written != tensor.num_bytes:
            raise ModelError(f"export: {key}: expected {tensor.num_bytes} bytes, was given {written}")
        self._next += 1
        if tensor is self._shards[shard][-1]:
            self.close()

    def finish(self) -> None:
        """Check that every tensor was written, and write the index if there are several shards."""
        if self._next != len(self._order):
            raise ModelError(f"export: {len(self._order) - self._next} of {len(self._order)} tensors were not written")
        if len(self._shards) > 1:
            mapping = {tensor.key: self._names[shard] for shard, tensor in self._order}
            total = sum(tensor.num_bytes for _, tensor in self._order)
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(mapping.items()))}, indent=2)
            (self._directory / _INDEX).write_text(text + "\n", encoding="utf-8")

    def close(self) -> None:
        """Sync and close the open shard, if any."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.fsync(descriptor)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def _open(self, shard: int) -> None:
        header = _header(self._shards[shard])
        self._descriptor = os.open(self._directory / self._names[shard], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        rest = memoryview(len(header).to_bytes(8, "little") + header)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
