"""Many transfers in flight, in both directions at once, on plain threads.

Threads with `preadv` and `pwritev` in pieces of 4-16 MiB are as fast as io_uring (measured: `docs/decisions/0003`), so there is
no native code. Invariant: an error in one piece fails its ticket and nothing else; no wait is without end.
"""

import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from headrace.files.block_file import BLOCK_BYTES, BlockFile, Bytes
from headrace.files.patience import Patience
from headrace.terms.closing import Closing
from headrace.terms.errors import DeviceStalled, StorageError
from headrace.terms.events import Notice, Sink
from headrace.terms.machine.drives import InFlight
from headrace.terms.sizes import format_seconds

Transfer = tuple[BlockFile, int, Bytes]

_DEFAULT = InFlight()


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    ticket: "PieceTicket"
    file: BlockFile
    offset: int
    buffer: Bytes


class PieceTicket:
    """A `Ticket` that is done when each of its pieces is."""

    def __init__(self, lane: "_Lane", transfers: Iterable[Transfer], piece_bytes: int) -> None:
        self._lane = lane
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._submitted_seconds = time.monotonic()
        self.error: BaseException | None = None
        # In order of submission, so that the first one left is the one to blame for a stall.
        self._open: dict[_Piece, None] = {}
        for file, offset, buffer in transfers:
            for start in range(0, buffer.size, piece_bytes):
                piece = _Piece(self, file, offset + start, buffer[start : start + piece_bytes])
                self._open[piece] = None
        self.pieces = tuple(self._open)
        if not self.pieces:
            self._finished.set()

    @property
    def done(self) -> bool:
        """See `Ticket.done`."""
        return self._finished.is_set()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """See `Ticket.wait`."""
        start_seconds = time.monotonic()
        warned = False
        while not self._finished.is_set():
            if timeout_seconds is None:
                # Counted from the last piece that moved: a long queue on a slow drive is no stall.
                since_seconds, limit_seconds = self._lane.moved_seconds(self._submitted_seconds), self._lane.deadline_seconds
            else:
                since_seconds, limit_seconds = start_seconds, timeout_seconds
            waited_seconds = time.monotonic() - since_seconds
            if waited_seconds >= limit_seconds:
                self._raise_stalled(waited_seconds, limit_seconds)
            if not warned and waited_seconds >= self._lane.stall_warning_seconds:
                self._lane.warn(f"{self._blamed()} has not moved for {format_seconds(waited_seconds)}")
                warned = True
            next_seconds = limit_seconds if warned else min(limit_seconds, self._lane.stall_warning_seconds)
            self._finished.wait(max(0.001, next_seconds - waited_seconds))
        if self.error is not None:
            raise self.error

    def finish(self, piece: _Piece, error: BaseException | None) -> None:
        """Take note that `piece` is over."""
        with self._lock:
            if self.error is None:
                self.error = error
            del self._open[piece]
            if not self._open:
                self.pieces = ()  # let go of the buffers
                self._finished.set()

    def _blamed(self) -> str:
        with self._lock:
            piece = next(iter(self._open), None)
        return "transfer" if piece is None else f"ssd-{self._lane.verb}: {piece.file.path} at offset {piece.offset}"

    def _raise_stalled(self, waited_seconds: float, limit_seconds: float) -> None:
        raise DeviceStalled(
            f"{self._blamed()} did not finish: waited {waited_seconds:.3g} s, limit {limit_seconds:.3g} s; "
            "see the kernel log for the drive, or raise the deadline"
        )


class _Lane:
    """One direction: a queue, its threads, and a count of what went through and of the CPU time that it took."""

    def __init__(
        self,
        verb: str,
        num_threads: int,
        *,
        stall_warning_seconds: float,
        deadline_seconds: float,
        sink: Sink,
        patience: Patience,
    ) -> None:
        self.verb = verb
        self.stall_warning_seconds = stall_warning_seconds
        self.deadline_seconds = deadline_seconds
        self.moved_bytes = 0
        self.cpu_seconds = 0.0
        self._sink, self._patience = sink, patience
        self._moved_seconds = time.monotonic()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._closed = False
        self._width = 0
        self._threads: list[threading.Thread] = []
        self.resize(num_threads)

    def resize(self, num_threads: int) -> None:
        """Serve the queue with `num_threads` from now on; surplus threads end behind what is queued."""
        with self._lock:
            if self._closed:
                raise StorageError(f"{self.verb} threads asked after close; open the store again")
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            for index in range(self._width, num_threads):
                thread = threading.Thread(target=self._serve, name=f"headrace-ssd-{self.verb}-{index}", daemon=True)
                thread.start()
                self._threads.append(thread)
            for _ in range(num_threads, self._width):
                self._queue.put(None)
            self._width = num_threads

    def submit(self, transfers: Iterable[Transfer], piece_bytes: int) -> PieceTicket:
        ticket = PieceTicket(self, transfers, piece_bytes)
        with self._lock:  # all pieces of a ticket before any of the next, and none behind the end marks
            if self._closed:
                raise StorageError(f"{self.verb} asked after close; open the store again")
            for piece in ticket.pieces:
                self._queue.put(piece)
        return ticket

    def moved_seconds(self, not_before_seconds: float) -> float:
        """Return when a piece last moved in this direction, or `not_before_seconds` if that is later."""
        return max(self._moved_seconds, not_before_seconds)

    def warn(self, text: str) -> None:
        self._sink(Notice(text=text))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._width):
                self._queue.put(None)
        start_seconds = time.monotonic()
        for thread in self._threads:
            # A thread that hangs in the kernel is left behind: it is a daemon.
            while thread.is_alive() and time.monotonic() < max(
                start_seconds + 1.0, self._moved_seconds + self.deadline_seconds
            ):
                thread.join(0.1)

    def _serve(self) -> None:
        counted_seconds = time.thread_time()
        while (piece := self._queue.get()) is not None:
            counted_seconds = self._move(piece, counted_seconds)
            del piece  # an idle thread must not keep the last buffer it moved: an import's is as large as a unit

    def _move(self, piece: _Piece, counted_seconds: float) -> float:
        """Move `piece`; return until when this thread's CPU time is counted. What it does later is the next piece's."""
        error: BaseException | None = None
        if piece.ticket.error is None:  # else the rest of a failed request is skipped
            try:
                if self.verb == "read":
                    piece.file.read_into(piece.offset, piece.buffer)
                else:
                    self._patience(lambda: self._try_write(piece))
            except BaseException as raised:  # whatever it is, it belongs to the one who waits
                error = raised
        cpu_seconds = time.thread_time()
        with self._lock:
            self._moved_seconds = time.monotonic()
            self.cpu_seconds += cpu_seconds - counted_seconds
            if error is None and piece.ticket.error is None:
                self.moved_bytes += piece.buffer.size
        piece.ticket.finish(piece, error)
        return cpu_seconds

    def _try_write(self, piece: _Piece) -> None:
        try:
            piece.file.write_from(piece.offset, piece.buffer)
        finally:
            self._moved_seconds = time.monotonic()  # a wait for space is no stall


def _ignore(event: object) -> None:
    """Sink of an engine that was given none."""


class ThreadEngine(Closing):
    """Separate pools of reader and writer threads; requests are served first come, first served, in pieces.

    A wait warns (to `sink`) when nothing moved for `stall_warning_seconds`, and fails after `deadline_seconds`. With
    `patience` writes wait for space.
    """

    def __init__(
        self,
        readers: int = _DEFAULT.threads,
        writers: int = _DEFAULT.threads,
        *,
        piece_bytes: int = _DEFAULT.piece_bytes,
        stall_warning_seconds: float = 10.0,
        deadline_seconds: float = 120.0,
        sink: Sink = _ignore,
        patience: Patience | None = None,
    ) -> None:
        self._piece_bytes, self.patience = piece_bytes, patience or Patience.none()
        lane = partial(
            _Lane,
            stall_warning_seconds=stall_warning_seconds,
            deadline_seconds=deadline_seconds,
            sink=sink,
            patience=self.patience,
        )
        self._read, self._write = lane("read", readers), lane("write", writers)

    @property
    def bytes_read(self) -> int:
        """Bytes read without an error since the start."""
        return self._read.moved_bytes

    @property
    def bytes_written(self) -> int:
        """Bytes written without an error since the start."""
        return self._write.moved_bytes

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds, system calls included, that its threads took for all pieces moved since the start."""
        return self._read.cpu_seconds + self._write.cpu_seconds

    def keep_in_flight(self, setting: InFlight) -> None:
        """Use so many threads in each direction, and for requests from now on pieces of that size.

        Raises:
            StorageError: the engine is closed, no thread is asked for, or the piece is no positive multiple of 4096.
        """
        if setting.threads < 1 or setting.piece_bytes < 1 or setting.piece_bytes % BLOCK_BYTES:
            raise StorageError(
                f"{setting.threads} threads with pieces of {setting.piece_bytes} bytes asked; "
                f"give at least one thread and a multiple of {BLOCK_BYTES}"
            )
        self._read.resize(setting.threads)
        self._write.resize(setting.threads)
        self._piece_bytes = setting.piece_bytes

    def read(self, transfers: Iterable[Transfer]) -> PieceTicket:
        """Start reading each `(file, offset, into)`; one ticket for all of them."""
        return self._read.submit(transfers, self._piece_bytes)

    def write(self, transfers: Iterable[Transfer]) -> PieceTicket:
        """Start writing each `(file, offset, data)`; one ticket for all of them."""
        return self._write.submit(transfers, self._piece_bytes)

    def close(self) -> None:
        """Finish what was asked for, then end the threads; leave a stalled one behind. A second call does nothing.

        What waits for space fails.
        """
        self.patience.close()
        self._read.close()
        self._write.close()
