"""The ledger: it takes operations with the buffers that they read and write, and derives what each must wait for.

A buffer is an integer (`terms.program.buffer`). A reader waits for those that wrote the buffer; a writer waits for these and
for all readers since. Pieces of a buffer, such as the chunks of a block's weights, are written and read separately. Writers of
different pieces do not wait for one another; a reader of the whole waits for all of them. A buffer that is *renewed* is written
to another place than it is read from, such as the uncommitted slot on an SSD. So nothing has to wait. A dependency that no
buffer explains (a throttle, so that not too much is under way) is given as `after`, with the reason beside it.

What one program hands to the next is a `Snapshot`: what each buffer holds, who wrote it, who reads it. Invariants: a snapshot
is canonical, so programs built from equal ones are equal. It has no reference older than one program: a program starts only
when the last but one is complete. Nothing here knows what a step is.

A reference to an operation is its index, or `~index` (negative) for one of the previous program.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

from headrace.terms.lanes import Lane
from headrace.terms.program import PASSING, PIECE_SHIFT, WHOLE_MASK, Op, Program, Verb, Waiting, buffer

Refs = tuple[int, ...]

_FIRST_PASSING = buffer(PASSING)
# Tuples with more references than this are stored once and shared: chunks of a unit often wait for all of it.
_LONG = 2


class Known(NamedTuple):
    """A buffer in a snapshot: what it holds (a number of the schedule's, -1 for nothing) and who wrote and reads it."""

    buffer: int
    content: int
    writers: Refs
    readers: Refs


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a program leaves to the next one, by buffer. A buffer without an entry is empty and idle; by default all are."""

    known: tuple[Known, ...] = ()


class What(TypedDict, total=False):
    """What an operation works on, and how much it computes: fields of `Op`."""

    unit: int
    part: int
    micro: int
    chunk: int
    flops: float
    late: bool
    calls: int
    linked: int
    leaving: int
    waiting: Waiting


class _Uses:
    """The uses of one buffer, as far as an operation may still have to wait for them.

    While it is written in pieces, `before` is what the writer of each piece waits for. `pieces` has the writer of each, and
    `read` the pieces that were read. A use of the whole ends that. Of consecutive operations on a lane that ends them in order,
    only the last is kept. There are few objects, because their number in a search decides how often Python's collector looks at
    all objects.
    """

    __slots__ = ("before", "pieces", "read", "reader_lane", "readers", "writer_lane", "writers")

    def __init__(self, writers: Sequence[int] = (), readers: Sequence[int] = ()) -> None:
        self.writers, self.readers = writers, readers
        self.writer_lane: Lane | None = None
        self.reader_lane: Lane | None = None
        self.before: Refs | None = None
        self.pieces: dict[int, int] | None = None
        self.read: set[int] | None = None

    def add_reader(self, index: int, lane: Lane, *, in_order: bool) -> None:
        """Enter an operation that reads the buffer or a piece of it."""
        if not isinstance(self.readers, list):
            self.readers = [*self.readers, index]
        elif in_order and self.reader_lane is lane:
            self.readers[-1] = index
        else:
            self.readers.append(index)
        self.reader_lane = lane

    def read_in_pieces(self, piece: int) -> Sequence[int]:
        """Return what a reader waits for while the buffer is written in pieces; a reader of the whole ends that."""
        assert self.pieces is not None
        assert self.read is not None
        if not piece:
            self.before = None
            return self.writers
        made = self.pieces.get(piece)
        if made is None:
            return self.before or ()
        self.read.add(piece)
        return (made,)

    def begin_pieces(self, before: Refs) -> None:
        """Begin to write the buffer in pieces, each after `before`."""
        self.before, self.pieces, self.read, self.writers, self.readers = before, {}, set(), (), ()
        self.writer_lane = self.reader_lane = None

    def write_piece(self, piece: int, index: int, lane: Lane, *, in_order: bool) -> Sequence[int]:
        """Enter the writer of a piece and return what it waits for."""
        assert self.pieces is not None
        assert self.read is not None
        made = self.pieces.get(piece)
        # Readers are not kept by piece: who writes a piece again waits for the readers of all pieces, if the piece was read at
        # all.
        waits = self.before or () if made is None else (made, *self.readers) if piece in self.read else (made,)
        self.pieces[piece] = index
        if not isinstance(self.writers, list):
            self.writers = [index]
        elif in_order and self.writer_lane is lane:
            self.writers[-1] = index
        else:
            self.writers.append(index)
        self.writer_lane = lane
        return waits

    def write_whole(self, index: int) -> None:
        """Enter the writer of the whole buffer."""
        self.writers, self.readers, self.before, self.reader_lane = (index,), (), None, None


class _AllUses(dict[int, _Uses]):
    def __missing__(self, whole: int) -> _Uses:
        uses = self[whole] = _Uses()
        return uses


class Ledger:
    """Builds one program upon a snapshot. `contents` says what buffers hold; the schedule changes it."""

    def __init__(self, before: Snapshot) -> None:
        self.contents = {known.buffer: known.content for known in before.known if known.content >= 0}
        self._uses = _AllUses(
            (known.buffer, _Uses([~ref for ref in known.writers], [~ref for ref in known.readers])) for known in before.known
        )
        self._ops: list[Op] = []
        self._shared: dict[Refs, Refs] = {}
        self._in_order = frozenset(lane for lane in Lane if lane.row.threads == 1)

    def op(
        self,
        verb: Verb,
        lane: Lane,
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
        renews: Sequence[int] = (),
        after: Sequence[int] = (),
        *,
        num_bytes: int = 0,
        **what: Unpack[What],
    ) -> int:
        """Append an operation and return its index. It also waits for `after`; say why, where that is given.

        `num_bytes` cross the lane; `what` it works on is as in `Op`.
        """
        index, all_uses, in_order = len(self._ops), self._uses, lane in self._in_order
        waits, touched = list(after), []
        for each in reads:
            whole = each & WHOLE_MASK
            touched.append(whole)
            uses = all_uses[whole]
            waits += uses.writers if uses.before is None else uses.read_in_pieces(each >> PIECE_SHIFT)
            uses.add_reader(index, lane, in_order=in_order)
        for each in writes:
            whole = each & WHOLE_MASK
            touched.append(whole)
            uses = all_uses[whole]
            if each != whole:
                if uses.before is None:
                    uses.begin_pieces((*uses.writers, *uses.readers))
                waits += uses.write_piece(each >> PIECE_SHIFT, index, lane, in_order=in_order)
            else:
                waits += uses.writers
                waits += uses.readers
                uses.write_whole(index)
        for each in renews:
            whole = each & WHOLE_MASK
            touched.append(whole)
            uses = all_uses[whole]
            if each != whole:
                if uses.before is None:
                    uses.begin_pieces((*uses.writers,))  # for readers of other pieces
                uses.write_piece(each >> PIECE_SHIFT, index, lane, in_order=in_order)
            else:
                uses.write_whole(index)
        here, there = self._split(waits)
        buffers = tuple(touched)
        buffers = self._shared.setdefault(buffers, buffers)
        self._ops.append(Op(index, verb, lane, bytes=num_bytes, buffers=buffers, after=here, after_previous=there, **what))
        return index

    def _split(self, waits: list[int]) -> tuple[Refs, Refs]:
        """Return the operations of this and of the previous program among `waits`, each once and in order."""
        if len(waits) > 1:
            waits = sorted(set(waits))
        there: Refs = ()
        if waits and waits[0] < 0:
            first = bisect_left(waits, 0)
            waits, there = waits[first:], tuple([~ref for ref in reversed(waits[:first])])
            if len(there) > _LONG:
                there = self._shared.setdefault(there, there)
        here = tuple(waits)
        return (self._shared.setdefault(here, here) if len(here) > _LONG else here), there

    def finish(self) -> tuple[Program, Snapshot]:
        """Return the program, and what it leaves to the next one."""
        contents, known = self.contents, []
        for whole in sorted({*self._uses, *contents}):
            if whole < _FIRST_PASSING:
                uses, content = self._uses[whole], contents.get(whole, -1)
                writers = tuple([ref for ref in uses.writers if ref >= 0])
                readers = tuple([ref for ref in uses.readers if ref >= 0])
                if content >= 0 or writers or readers:
                    known.append(Known(whole, content, writers, readers))
        return Program(tuple(self._ops)), Snapshot(tuple(known))
