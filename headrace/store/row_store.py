"""Rows of a table on a drive: any of them can be written in a step, and a crash leaves each as it was committed.

A *page* holds one large row or several small ones, with all planes: whole blocks of 4 KiB. It has two places side by side,
which are read at once. Each begins with what it is:

    check of the next four | checksum of the rest | session | update | page | number of the last update, for each row | rows

A *session* is one stretch of writing without interruption, under a number of its own. The *history* has the last committed
update of each session; the caller keeps it in its commit record. So what an interrupted step left is never taken for a later
step of the same number. Pages that were never written read as zeros.

Invariants: a place that counts under the committed history is never written to. A reader gets the newest place that counts, or
an error if that one is damaged; it never gets the older one instead.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.files import BLOCK_BYTES, BlockFile, Bytes
from headrace.machine.host_memory import huge_page_buffer
from headrace.store.checksum import checksum
from headrace.terms.errors import StorageError
from headrace.terms.sizes import round_up

History = tuple[tuple[int, int], ...]  # session and its last committed update, oldest first

_RUN_BYTES = 4 << 20  # adjacent pages that are read together
_WORD_BYTES = 8
_HEADER_WORDS = 5
_VIRGIN = (-1, 0)  # the rank of a page that was never written
_NEVER = (-2, 0)  # of one that does not count


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where `num_rows` rows of `row_bytes` bytes (a multiple of 8, all planes together) lie."""

    num_rows: int
    row_bytes: int

    @property
    def rows_per_page(self) -> int:
        """How many rows share a page: as many as fit in 4 KiB, at least one."""
        return max(1, (BLOCK_BYTES - _HEADER_WORDS * _WORD_BYTES) // (self.row_bytes + _WORD_BYTES))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in one place."""
        return round_up(_HEADER_WORDS * _WORD_BYTES + self.rows_per_page * (self.row_bytes + _WORD_BYTES), BLOCK_BYTES)

    @property
    def num_pages(self) -> int:
        """Pages of the table."""
        return -(-self.num_rows // self.rows_per_page)

    @property
    def file_bytes(self) -> int:
        """Bytes of the file: all pages, in two places."""
        return 2 * self.page_bytes * self.num_pages


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages in memory, which may be changed in place: `seen` int64 `(pages * rows a page,)`, `rows` uint8 of that many rows."""

    numbers: NDArray[np.int64]
    free_places: NDArray[np.int64]  # by page: the place that does not count
    seen: NDArray[np.int64]
    rows: Bytes
    rows_per_page: int

    def positions(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where rows `ids` are in `seen` and `rows`; their pages must have been read."""
        at = np.searchsorted(self.numbers, ids // self.rows_per_page)
        positions: NDArray[np.int64] = at * self.rows_per_page + ids % self.rows_per_page
        return positions


class RowStore:
    """The rows in `file`. Not for several threads at once.

    Raises:
        StorageError: the file is too small for the table.
    """

    def __init__(self, file: BlockFile, layout: RowLayout, history: History = ()) -> None:
        if file.size_bytes < layout.file_bytes:
            raise StorageError(f"{file.path}: {layout.file_bytes} bytes expected, found {file.size_bytes}")
        self._file, self.layout, self._history = file, layout, history
        self._sealed: History | None = None
        self.bytes_read = self.bytes_written = 0
        self._update = -1  # the last one written in this session
        self._begin()

    def read(self, ids: NDArray[np.int64]) -> Pages:
        """Return the pages of rows `ids`, as last written in this session or committed before.

        Raises:
            StorageError: a page is damaged, or the drive failed.
        """
        layout = self.layout
        if ids.size and not 0 <= ids.min() <= ids.max() < layout.num_rows:
            raise StorageError(f"{self._file.path}: rows 0 to {layout.num_rows - 1}; asked {ids.min()} to {ids.max()}")
        numbers = np.unique(ids // layout.rows_per_page)
        count = numbers.size * layout.rows_per_page
        free, seen = np.empty(numbers.size, np.int64), np.empty(count, np.int64)
        rows = np.empty((count, layout.row_bytes), np.uint8)
        for start, run in _runs(numbers, max(1, _RUN_BYTES // (2 * layout.page_bytes))):
            buffer = huge_page_buffer(run.size * 2 * layout.page_bytes)
            self._file.read_into(int(run[0]) * 2 * layout.page_bytes, buffer)
            self.bytes_read += buffer.size
            for index, both in enumerate(buffer.reshape(run.size, 2, layout.page_bytes)):
                at = slice((start + index) * layout.rows_per_page, (start + index + 1) * layout.rows_per_page)
                place, free[start + index] = self._choose(int(run[index]), both)
                seen[at], rows[at] = self._parts(both[place])
        return Pages(numbers, free, seen, rows, layout.rows_per_page)

    def write(self, pages: Pages, update: int) -> None:
        """Write `pages` as they are after `update`; they count once that is committed. Whoever writes has just read them.

        Raises:
            StorageError: a commit is under way, or the drive failed; `abandon` what this update wrote then.
        """
        if self._sealed is not None:
            raise StorageError(f"{self._file.path}: update {update} asked while a commit is under way; wait for it first")
        page = huge_page_buffer(self.layout.page_bytes)
        words = page.view(np.uint64)
        for index, number in enumerate(pages.numbers.tolist()):
            at = slice(index * pages.rows_per_page, (index + 1) * pages.rows_per_page)
            seen, rows = self._parts(page)
            seen[:], rows[:] = pages.seen[at], pages.rows[at]
            words[1:_HEADER_WORDS] = checksum(words[_HEADER_WORDS:]), self._session, update, number
            words[0] = checksum(words[1:_HEADER_WORDS])
            self._file.write_from((2 * number + int(pages.free_places[index])) * self.layout.page_bytes, page)
            self.bytes_written += page.size
        self._update = max(self._update, update)

    def seal(self) -> History:
        """Make durable what was written, and return the history that the commit record must hold. Then call `committed`.

        Raises:
            StorageError: the drive failed.
        """
        self._file.sync()
        self._sealed = self._with_session(self._update) if self._update >= 0 else self._history
        return self._sealed

    def committed(self) -> None:
        """Take note that the record with the history of `seal` is durable."""
        if self._sealed is not None:
            self._history, self._sealed = self._sealed, None

    def abandon(self) -> None:
        """Forget what was written since the last commit: a new session begins."""
        self._sealed = None
        self._begin()

    def _begin(self) -> None:
        self._session = secrets.randbits(63) + 1
        self._update = -1

    def _with_session(self, update: int) -> History:
        return (*(entry for entry in self._history if entry[0] != self._session), (self._session, update))

    def _choose(self, number: int, both: Bytes) -> tuple[int, int]:
        """Return the place to read and the place to write of a page."""
        now = self._with_session(self._update)
        ranks = [self._rank(number, page, now) for page in both]
        whole = [_is_whole(page) for page in both]
        best = max(ranks)
        readable = [place for place in (0, 1) if ranks[place] == best and whole[place]]
        if best == _NEVER or not readable:
            raise StorageError(
                f"{self._file.path}: page {number} is damaged: neither place holds its last committed version; "
                "restore the file, or go back to a kept checkpoint"
            )
        committed = [self._rank(number, page, self._history) for page in both]
        return readable[0], 1 - max((0, 1), key=lambda place: (committed[place], whole[place]))

    def _rank(self, number: int, page: Bytes, history: History) -> tuple[int, int]:
        """Return which of two places is newer under `history`: the session's index and the update.

        Raises:
            StorageError: the page header's checksum is wrong. A torn write cannot cause that: a header fits in one sector.
        """
        check, _, session, update, found = page[: _HEADER_WORDS * _WORD_BYTES].view(np.uint64).tolist()
        if check != checksum(page[_WORD_BYTES : _HEADER_WORDS * _WORD_BYTES]) or (session and found != number):
            raise StorageError(f"{self._file.path}: page {number} is damaged: its header does not fit; restore the file")
        if session == 0:
            return _VIRGIN
        for index, (known, last) in enumerate(history):
            if known == session:
                return (index, update) if update <= last else _NEVER
        return _NEVER

    def _parts(self, page: Bytes) -> tuple[NDArray[np.int64], Bytes]:
        """Return the updates seen and the rows in a page, as views."""
        count, header = self.layout.rows_per_page, _HEADER_WORDS * _WORD_BYTES
        first = header + count * _WORD_BYTES
        rows = page[first : first + count * self.layout.row_bytes].reshape(count, self.layout.row_bytes)
        return page[header:first].view(np.int64), rows


def _is_whole(page: Bytes) -> bool:
    words = page.view(np.uint64)
    return checksum(words[_HEADER_WORDS:]) == int(words[1])


def _runs(numbers: NDArray[np.int64], most: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield where each run of adjacent numbers begins, and the run, of which `most` are taken at a time."""
    start = 0
    for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
        for first in range(0, run.size, most):
            yield start + first, run[first : first + most]
        start += run.size
