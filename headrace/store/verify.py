"""Reads everything that is committed and compares checksums.

Invariant: what passes is byte for byte what was written; what does not is named down to file and offset.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.files import Bytes, Ticket, Volume
from headrace.machine.host_memory import huge_page_buffer
from headrace.store.checksum import checksum
from headrace.store.places import FamilyPlace
from headrace.store.slots import VIRGIN, GroupVersion
from headrace.terms.errors import CorruptData
from headrace.terms.sizes import format_bytes

# Told `(bytes verified, bytes in all)` after each chunk.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Verification:
    place: FamilyPlace
    chunk: int
    offset: int
    num_bytes: int
    stored: int


def verify_groups(volume: Volume, groups: Sequence[tuple[FamilyPlace, GroupVersion]], progress: Progress | None) -> None:
    """Compare each chunk of each version with its checksum; the next chunk is read meanwhile. Needs room for two chunks.

    Raises:
        CorruptData: the first chunk that differs.
    """
    checks = [check for place, version in groups for check in _checks(place, version)]
    if not checks:
        return
    total_bytes = sum(check.num_bytes for check in checks)
    largest_bytes = max(check.num_bytes for check in checks)
    buffers = (huge_page_buffer(largest_bytes), huge_page_buffer(largest_bytes))
    done_bytes = 0
    pending = _start(volume, checks[0], buffers[0])
    for index, check in enumerate(checks):
        ticket, into = pending
        if index + 1 < len(checks):
            pending = _start(volume, checks[index + 1], buffers[(index + 1) % 2])
        ticket.wait()
        _compare(volume, check, into)
        done_bytes += check.num_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)


def _checks(place: FamilyPlace, version: GroupVersion) -> Iterator[_Verification]:
    if version.slot != VIRGIN:
        for chunk in range(place.num_chunks):
            offset = place.offset(version.slot, chunk)
            yield _Verification(place, chunk, offset, place.chunk_bytes(chunk), version.checksums[chunk])


def _start(volume: Volume, check: _Verification, buffer: Bytes) -> tuple[Ticket, Bytes]:
    into = buffer[: check.num_bytes]
    return volume.read(check.offset, into), into


def _compare(volume: Volume, check: _Verification, content: Bytes) -> None:
    computed = checksum(content)
    if computed == check.stored:
        return
    path, file_offset = volume.locate(check.offset)
    striped = f" (striped over {len(volume.files)} files from there)" if len(volume.files) > 1 else ""
    raise CorruptData(
        f"{check.place.label}, chunk {check.chunk}: {path} at offset {file_offset}, "
        f"{format_bytes(check.num_bytes)}{striped}: stored checksum {check.stored:#018x}, computed {computed:#018x}. The "
        "drive returned other bytes than were written: do not continue this run, and check the drive"
    )
