"""The commit record: what makes a step durable, in one checksummed block of bytes.

    magic, format version, run id, sequence number, lengths | JSON | slots (int8) | versions | checksums | BLAKE2b of all before

Two files take turns, so that the record before the newest is never touched. Invariant: at every moment at least one file holds
a whole record, once there was one. A torn record is never taken for a whole one.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from headrace.files import BLOCK_BYTES, BlockFile, Patience
from headrace.machine.host_memory import huge_page_buffer
from headrace.store.slots import GroupVersion
from headrace.terms.errors import StorageError
from headrace.terms.json_text import parse_json
from headrace.terms.sizes import round_up

RECORD_FORMAT = 1
_MAGIC = b"HEADRACE"
_HEADER = struct.Struct("<8sI16sQQQQ")  # magic, format, run id, sequence, JSON bytes, groups, checksums
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """Commit number `sequence` (from 1): the caller's `payload`, and each group's committed version."""

    run_id: str
    sequence: int
    payload: Mapping[str, Any]
    groups: tuple[GroupVersion, ...]


def pack_record(record: CommitRecord) -> bytes:
    """Return the bytes of `record`.

    Raises:
        TypeError: `payload` holds something that JSON has no word for.
    """
    payload = json.dumps(dict(record.payload)).encode()
    checksums = [value for group in record.groups for value in group.checksums]
    header = _HEADER.pack(
        _MAGIC,
        RECORD_FORMAT,
        record.run_id.encode(),
        record.sequence,
        len(payload),
        len(record.groups),
        len(checksums),
    )
    slots = np.array([group.slot for group in record.groups], dtype="<i1").tobytes()
    versions = np.array([group.version for group in record.groups], dtype="<u8").tobytes()
    body = header + payload + slots + versions + np.array(checksums, dtype="<u8").tobytes()
    return body + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def unpack_record(content: bytes, run_id: str, num_chunks: Sequence[int]) -> CommitRecord | None:
    """Return the record at the start of `content`, or None unless it is whole and of run `run_id` with these groups."""
    if len(content) < _HEADER.size:
        return None
    magic, version, found_id, sequence, json_bytes, num_groups, num_checksums = _HEADER.unpack_from(content)
    body_bytes = _HEADER.size + json_bytes + num_groups + 8 * num_groups + 8 * num_checksums
    if magic != _MAGIC or version != RECORD_FORMAT or len(content) < body_bytes + _DIGEST_BYTES:
        return None
    digest = hashlib.blake2b(content[:body_bytes], digest_size=_DIGEST_BYTES).digest()
    if content[body_bytes : body_bytes + _DIGEST_BYTES] != digest:
        return None
    if found_id != run_id.encode() or num_groups != len(num_chunks) or num_checksums != sum(num_chunks):
        return None
    start = _HEADER.size + json_bytes
    slots = np.frombuffer(content, dtype="<i1", count=num_groups, offset=start).tolist()
    versions = np.frombuffer(content, dtype="<u8", count=num_groups, offset=start + num_groups).tolist()
    checksums = iter(np.frombuffer(content, dtype="<u8", count=num_checksums, offset=start + 9 * num_groups).tolist())
    groups = tuple(
        GroupVersion(slot, group_version, tuple(islice(checksums, count)))
        for slot, group_version, count in zip(slots, versions, num_chunks, strict=True)
    )
    return CommitRecord(run_id=run_id, sequence=sequence, payload=parse_json(content[_HEADER.size : start]), groups=groups)


class RecordFiles:
    """The two alternating files. Record number `n` goes to file `n % 2`."""

    def __init__(self, files: Sequence[BlockFile], patience: Patience | None = None) -> None:
        self.files, self._patience = tuple(files), patience or Patience.none()

    def write(self, sequence: int, content: bytes) -> None:
        """Make packed record number `sequence` durable. On an error the file may hold it or not: `erase` it or write it again.

        Raises:
            StorageError: the drive failed, or has no space.
        """
        file = self.files[sequence % 2]
        buffer = huge_page_buffer(round_up(len(content), BLOCK_BYTES))
        buffer[: len(content)] = np.frombuffer(content, dtype=np.uint8)

        def write() -> None:
            file.extend(buffer.size)
            file.write_from(0, buffer)
            file.sync()

        self._patience(write)

    def erase(self, sequence: int) -> None:
        """Make sure that the place of record `sequence` holds no record."""
        file = self.files[sequence % 2]
        file.write_from(0, huge_page_buffer(BLOCK_BYTES))
        file.sync()

    def read(self, run_id: str, num_chunks: Sequence[int], at: int | None = None) -> tuple[CommitRecord | None, bool]:
        """Return the newest whole record, and whether the other file holds something that is none: a torn or damaged one.

        Return record number `at` if that is given, and erase the one after it.
        """
        found: list[CommitRecord] = []
        damaged = False
        for file in self.files:
            content = _content(file)
            record = unpack_record(content, run_id, num_chunks)
            if record is not None:
                found.append(record)
            elif any(content):
                damaged = True
        if at is not None:
            self.erase(at + 1)
            return next((record for record in found if record.sequence == at), None), False
        return max(found, key=lambda record: record.sequence, default=None), damaged

    def close(self) -> None:
        """Close both files."""
        for file in self.files:
            file.close()


def _content(file: BlockFile) -> bytes:
    buffer = huge_page_buffer(round_up(max(file.size_bytes, BLOCK_BYTES), BLOCK_BYTES))[: file.size_bytes]
    try:
        file.read_into(0, buffer)
    except StorageError:
        return b"unreadable"  # as good as torn: the other file decides
    return buffer.tobytes()
