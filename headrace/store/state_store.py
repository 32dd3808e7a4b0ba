"""The durable state of a run: weights and optimizer states of every unit, two slots each, committed step by step.

Safe to call from several threads: reads never wait for a commit; writes do. Invariant: whatever happens between two commits,
opening the run again yields the state of the last commit, bit for bit.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from headrace.files import Bytes, DoneTicket, ThreadEngine, Ticket
from headrace.store.assembly import StoreParts, StoreRequest, create_parts, open_parts
from headrace.store.checksum import checksum
from headrace.store.committed import CommittedState
from headrace.store.lent import LentFiles, NothingLent
from headrace.store.manifest import Manifest
from headrace.store.places import FamilyPlace
from headrace.store.record import CommitRecord, pack_record
from headrace.store.run_folders import OpenFile, open_direct
from headrace.store.slots import VIRGIN, GroupSlots
from headrace.store.transfers import Transfers, settle
from headrace.store.verify import Progress, verify_groups
from headrace.terms.closing import Closing
from headrace.terms.errors import StorageError
from headrace.terms.events import Notice, Sink
from headrace.terms.families import Durability
from headrace.terms.machine.drives import InFlight


class StateStore(Closing):
    """The state of one run on its SSD directories. Make one with `StateStore.create` or `StateStore.open`.

    Units are indices into `manifest.units`, families their names there, chunks indices into `Family.chunks`. Buffers are
    contiguous 1-D uint8 arrays, aligned to 4096 bytes; they belong to the transfer until its ticket is done.
    """

    def __init__(self, parts: StoreParts, newest: CommitRecord | None) -> None:
        self._parts = parts
        self._newest = newest
        self._scratch_bytes = parts.manifest.scratch_bytes
        places = parts.places.committed
        versions = newest.groups if newest else [None] * len(places)
        self._slots = {
            place: GroupSlots(place.label, place.num_chunks, version, once=place.durability is Durability.ONCE)
            for place, version in zip(places, versions, strict=True)
        }
        self._transfers = Transfers(places)
        self._checksum_seconds = 0.0
        # Writers, commit and abandon exclude one another; `_table` guards the tables for as long as a look-up takes. Nobody
        # waits for a transfer while holding `_table`, nor a writer while holding `_writing`: others would wait along.
        self._writing = threading.RLock()
        self._commits = threading.Lock()  # held by a commit, or by whoever reads the last one; taken before `_writing`
        self._table = threading.Lock()
        self._record_in_doubt = False
        self._unsynced_error: StorageError | None = None
        self._lent: LentFiles = NothingLent()
        self._closed = False

    @classmethod
    def create(
        cls,
        run_directory: Path,
        request: StoreRequest,
        *,
        sink: Sink,
        open_file: OpenFile = open_direct,
        engine: ThreadEngine | None = None,
    ) -> Self:
        """Reserve space for the slots of every family and for scratch, striped over the directories of `request`.

        `open_file` and `engine` replace the files and the threads; an engine given is not closed with the store.

        Raises:
            ConfigError, DiskFull: a directory or a size will not do; nothing was made.
            RunDirectoryError: the run directory holds a run already, or is in use.
            StorageError: a file could not be made; what had been is removed again.
        """
        return cls(create_parts(Path(run_directory), request, open_file=open_file, engine=engine, sink=sink), None)

    @classmethod
    def open(
        cls,
        run_directory: Path,
        *,
        sink: Sink,
        open_file: OpenFile = open_direct,
        engine: ThreadEngine | None = None,
        at: int | None = None,
    ) -> Self:
        """Open the run at its last commit, or at commit number `at`: the one after it is then forgotten.

        Raises:
            RunDirectoryError: no run, another format, in use, never committed, or a data file missing or too short.
            CorruptData: a commit record is damaged, and so are the data of the other one.
        """
        parts, newest, damaged = open_parts(Path(run_directory), open_file=open_file, engine=engine, sink=sink, at=at)
        store = cls(parts, newest)
        for file in parts.volume.files:
            if not file.direct:
                sink(Notice(text=f"{file.path}: its file system refuses O_DIRECT; buffered input and output is slower"))
        if damaged:
            # Either the record being written at a crash is torn: then the other's data are whole. Or the newest was
            # damaged later: then the other's slots may have been written to since. Only the checksums can tell.
            sink(Notice(text=f"{run_directory}: {damaged}; going back to the other record and verifying its data"))
            try:
                store.verify()
            except BaseException:
                store.close()
                raise
        return store

    @property
    def manifest(self) -> Manifest:
        """What the store was created with."""
        return self._parts.manifest

    @property
    def record(self) -> dict[str, Any]:
        """A copy of what the last commit was given; empty before the first."""
        return dict(self._newest.payload) if self._newest else {}

    @property
    def committed_version(self) -> int:
        """Number of commits so far."""
        return self._newest.sequence if self._newest else 0

    def lend(self, files: LentFiles) -> None:
        """Read families that are `Durability.LENT` from `files`, which are closed with the store."""
        self._lent = files

    @property
    def bytes_read(self) -> int:
        """Bytes that the engine read, and those that were read of files that are lent."""
        return self._parts.engine.bytes_read + self._lent.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes that the engine wrote, without commit records."""
        return self._parts.engine.bytes_written

    @property
    def io_cpu_seconds(self) -> float:
        """CPU seconds that the engine's threads took, and the checksums that were taken here."""
        return self._parts.engine.cpu_seconds + self._checksum_seconds

    def heed(self, check: Callable[[], None]) -> None:
        """Call `check` while a write waits for space; what it raises ends the wait, and the write fails."""
        self._parts.engine.patience.heed = check

    def keep_in_flight(self, setting: InFlight) -> None:
        """Move bytes with so many threads and pieces of that size from now on."""
        self._parts.engine.keep_in_flight(setting)

    def read(self, unit: int, family: str, into: Bytes, chunk: int | None = None) -> Ticket:
        """Start reading one chunk of a family, or all of it: its newest complete version, zeros if it was never written.

        Planes lie in a chunk as `Family` says. Waits for writes of that version that are under way. What is scratch is read as
        it lies: neither checked nor ordered with writes under way.

        Raises: StorageError: `into` has another size, a write of that version failed, or the next version is half written over
            it. Or the unit has no such family on the drives.
        """
        if self._parts.places.is_lent(unit, family):
            return self._lent.read(unit, into)
        place = self._place(unit, family)
        if place.whole and (others := self._read_of_others(place, into, chunk)) is not None:
            return others
        chunks = place.own(chunk)
        into = place.part(into) if chunk is None else into
        if place.durability.committed:
            return self._read(place, chunks, into)
        place.check_size(into, sum(place.chunk_bytes(chunk) for chunk in chunks))
        return self._parts.volume.read(place.offset(0, chunks[0]), into)

    def read_span(self, unit: int, family: str, start: int, into: Bytes) -> Ticket:
        """Start reading a part of a family that is written only once, from its byte `start` on; both in whole pages."""
        if self._parts.places.is_lent(unit, family):
            return self._lent.read_span(unit, start, into)
        place = self._place(unit, family)
        return self._parts.volume.read(place.offset(self._slots[place].committed.slot, 0) + start, into)

    def write(self, unit: int, family: str, chunk: int, data: Bytes, known_checksum: int | None = None) -> Ticket:
        """Start writing one chunk of a family to the slot that is not committed.

        Computes its checksum, unless that was done when the data were made. Waits for transfers under way in the same place.

        Raises: StorageError: `data` has another size; the family is written only once and was committed; the unit has no such
            family on the drives. Or a commit failed, and was neither repeated nor abandoned.
        """
        place = self._place(unit, family)
        if place.whole and not place.own(chunk):
            return self._write_of_others(place, chunk, data)
        chunk -= place.first
        if place.durability.committed:
            return self._write(place, chunk, data, known_checksum)
        place.check_size(data, place.chunk_bytes(chunk))
        return self._parts.volume.write(place.offset(0, chunk), data)

    def commit(self, record: Mapping[str, Any]) -> None:
        """Make all writes so far durable, together with `record` (JSON). Units not written keep their version.

        Waits while somebody reads the last commit (`committed`).
        After an error the last commit stands; call `commit` again, or `abandon`.

        Raises:
            StorageError: a write failed, a unit is written in part, or the drive failed.
            TypeError: `record` is not JSON.
        """
        with self._commits, self._writing:
            if self._unsynced_error is not None:
                raise StorageError("writes were lost when they were to be made durable; abandon them") from self._unsynced_error
            sequence = self.committed_version + 1
            groups = tuple(slots.newest(sequence) for slots in self._slots.values())
            newest = CommitRecord(run_id=self.manifest.run_id, sequence=sequence, payload=dict(record), groups=groups)
            content = pack_record(newest)
            for ticket in self._transfers.writes.values():
                ticket.wait()
            self._sync_data()
            self._record_in_doubt = True
            self._parts.records.write(sequence, content)
            with self._table:
                for slots, version in zip(self._slots.values(), groups, strict=True):
                    slots.commit(version)
                self._transfers.writes.clear()
                self._newest = newest
            self._record_in_doubt = False

    def committed(self) -> CommittedState:
        """Return the last commit, to be read while steps go on; close it. Waits for a commit, or another reader, to end."""
        self._commits.acquire()
        return CommittedState(self.manifest, self._read_committed, self._commits.release)

    def abandon(self) -> None:
        """Forget all writes since the last commit; reads see the committed version again.

        Raises:
            DeviceStalled: a write is still under way after the deadline.
            StorageError: a commit failed before, and its record cannot be erased.
        """
        with self._writing:
            for ticket in self._transfers.writes.values():
                settle(ticket)
            if self._record_in_doubt:
                # The record may be whole on the drive: a later opening would choose it, after its slots were overwritten.
                self._parts.records.erase(self.committed_version + 1)
                self._record_in_doubt = False
            self._unsynced_error = None
            with self._table:
                for slots in self._slots.values():
                    slots.abandon()
                self._transfers.writes.clear()

    def verify(self, progress: Progress | None = None) -> None:
        """Read everything of the committed version and compare checksums. Writes wait meanwhile.

        Raises:
            CorruptData: names unit, planes, file, offset, stored and computed checksum.
        """
        with self._writing:
            groups = [(place, slots.committed) for place, slots in self._slots.items()]
            verify_groups(self._parts.volume, groups, progress)

    def holds(self, unit: int, family: str, chunk: int) -> bool:
        """Return whether a chunk of a family lies here, and not with others."""
        return bool(self._place(unit, family).own(chunk))

    def _read_of_others(self, place: FamilyPlace, into: Bytes, chunk: int | None) -> Ticket | None:
        """Read what is asked for from those who hold it; None where what lies here is enough: others bring the rest."""
        return None if place.own(chunk) or chunk is None else DoneTicket()

    def _write_of_others(self, place: FamilyPlace, chunk: int, data: Bytes) -> Ticket:
        """Write a chunk that others hold: they do that themselves."""
        return DoneTicket()

    def scratch_read(self, offset: int, into: Bytes) -> Ticket:
        """Start reading scratch bytes: not durable, not checked, not ordered with writes under way."""
        return self._parts.volume.read(self._scratch_offset(offset, into), into)

    def scratch_write(self, offset: int, data: Bytes) -> Ticket:
        """Start writing scratch bytes."""
        return self._parts.volume.write(self._scratch_offset(offset, data), data)

    def grow_scratch(self, scratch_bytes: int) -> None:
        """Make the scratch region at least `scratch_bytes` long, until the store is closed.

        Raises:
            DiskFull: there is not that much space; the region stays as it was.
        """
        with self._writing:
            if scratch_bytes > self._scratch_bytes:
                self._parts.volume.extend(self._parts.places.durable_bytes + scratch_bytes)
                self._scratch_bytes = scratch_bytes

    def close(self) -> None:
        """Finish transfers under way, close the files and free the lock. Does not commit. A second call does nothing."""
        if not self._closed:
            self._finish()
            self._parts.close()

    def remove(self) -> None:
        """Close, then delete data files, their folders and the records.

        Raises:
            StorageError: something cannot be removed; names it.
        """
        if not self._closed:
            self._finish()
            self._parts.remove()

    def _finish(self) -> None:
        """Finish transfers under way; what waits for space fails."""
        self._closed = True
        self._parts.engine.patience.close()
        self._transfers.settle_all()
        self._lent.close()

    def _place(self, unit: int, family: str) -> FamilyPlace:
        place = self._parts.places.families.get((unit, family))
        if place is None or not place.slot_offsets:
            raise StorageError(f"unit {self.manifest.units[unit].name}: no family {family!r} on the drives")
        return place

    def _read(self, place: FamilyPlace, chunks: Sequence[int], into: Bytes) -> Ticket:
        place.check_size(into, sum(place.chunk_bytes(chunk) for chunk in chunks))
        while True:
            with self._table:
                slots = self._slots[place]
                slot = slots.slot_to_read(chunks)
                if slot == VIRGIN or not chunks:
                    break
                writes = [self._transfers.writes[place, chunk] for chunk in chunks] if slot != slots.committed.slot else []
                if all(write.done for write in writes):
                    for write in writes:
                        write.wait()  # raises if it failed
                    ticket = self._parts.volume.read(place.offset(slot, chunks[0]), into)
                    self._transfers.note_read(place, slot, chunks, ticket)
                    return ticket
            for write in writes:
                write.wait()
        into.fill(0)
        return DoneTicket()

    def _read_committed(self, unit: int, family: str, into: Bytes, chunk: int | None) -> Ticket:
        """As `read`, of the last commit. Nobody writes where it lies: neither steps, nor a commit, which waits."""
        if self._parts.places.is_lent(unit, family):
            return self._lent.read(unit, into)
        place = self._place(unit, family)
        chunks, slot = place.own(chunk), self._slots[place].committed.slot
        place.check_size(into, sum(map(place.chunk_bytes, chunks)))
        if slot != VIRGIN and chunks:
            return self._parts.volume.read(place.offset(slot, chunks[0]), into)
        into.fill(0)
        return DoneTicket()

    def _write(self, place: FamilyPlace, chunk: int, data: Bytes, known_checksum: int | None) -> Ticket:
        place.check_size(data, place.chunk_bytes(chunk))
        start_seconds = time.thread_time()
        value = checksum(data) if known_checksum is None else known_checksum
        checksum_seconds = time.thread_time() - start_seconds
        while True:
            with self._writing:
                if self._record_in_doubt:
                    raise StorageError(
                        f"{place.label}: the last commit failed while its record was written; "
                        "commit again or abandon before writing"
                    )
                with self._table:
                    slots = self._slots[place]
                    in_the_way = self._transfers.in_the_way(place, slots.slot_to_write, chunk)
                    if not in_the_way:
                        ticket = self._parts.volume.write(place.offset(slots.slot_to_write, chunk), data)
                        slots.note_write(chunk, value)
                        self._transfers.writes[place, chunk] = ticket
                        self._checksum_seconds += checksum_seconds
                        return ticket
            for transfer in in_the_way:
                settle(transfer)

    def _sync_data(self) -> None:
        try:
            self._parts.volume.sync()
        except StorageError as error:
            # The kernel reports lost writes once; a second sync would succeed without them.
            self._unsynced_error = error
            raise

    def _scratch_offset(self, offset: int, buffer: Bytes) -> int:
        if offset < 0 or offset + buffer.size > self._scratch_bytes:
            raise StorageError(f"scratch bytes {offset} to {offset + buffer.size} asked, the region has {self._scratch_bytes}")
        return self._parts.places.durable_bytes + offset
