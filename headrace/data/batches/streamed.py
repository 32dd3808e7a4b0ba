"""Batches of data that are read as they come: a buffer of rows is tokenised, shuffled and packed, then the next one is read.

Nothing is written, and nothing but one buffer is in memory, however long the data are.
Invariants: those of `batches.py`. Data that fit into one buffer give the batches that `stream.py` gives of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain, islice
from typing import Any

from headrace.data.batches.batches import Batches, Cursor, Stretch, read_position
from headrace.data.batches.stream import first_rows, joined_batch, lengths_of, rows_of
from headrace.data.read.sources import Source
from headrace.data.tokens.token_writer import held_tokens
from headrace.data.tokens.tokenize import Samples, pad_id_of
from headrace.data.values.tokens import TokenSet
from headrace.data.values.values import Batch, DataSpec, Row, Tokenizer
from headrace.terms.errors import DataError
from headrace.terms.packed_rows import PackedRows

# So many tokens a buffer has at most, if nobody gives its rows; they take 66 MiB.
_BUFFER_TOKENS = 1 << 24
# Numbers the buffers of an epoch, of which the first has the epoch's own number.
_BUFFER = 1 << 32


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """Where a buffer begins, and what was read and left out before it. `buffer` counts those of an epoch."""

    epoch: int = 0
    buffer: int = 0
    source: int = 0
    row: int = 0
    read: int = 0
    skipped: int = 0
    cut: int = 0
    dropped: int = 0

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "BufferPlace":
        """Return the place in a saved position. Raises as `int` and as mappings do."""
        return cls(**{field.name: int(found[field.name]) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class _Buffer(Stretch):
    begin: BufferPlace
    end: BufferPlace
    tokens: TokenSet


class StreamedBatches(Batches):
    """`Batches` of `sources`, in their order, over and over. How long an epoch is shows at its end."""

    def __init__(
        self,
        sources: Sequence[Source],
        spec: DataSpec,
        tokenizer: Tokenizer,
        *,
        buffer_rows: int | None = None,
        held_out: TokenSet | None = None,
        fit: Callable[[TokenSet], TokenSet] = lambda tokens: tokens,
    ) -> None:
        """Start at the first row. A buffer has `buffer_rows` rows of the sources; `fit` refuses tokens that suit no model."""
        super().__init__(spec, held_out, spec.rows_per_step, None)
        self._sources, self._tokenizer, self._fit = sources, tokenizer, fit
        self._buffer_rows = buffer_rows or max(1, _BUFFER_TOKENS // spec.sequence_length)
        self._open: tuple[tuple[int, int], Iterator[Row]] | None = None  # rows of a source, and the next one's place
        self._firsts: dict[int, Row | None] = {}  # of each source, if reading began in its midst
        self._cursor = Cursor[_Buffer](lambda last: self._filled(last.end if last else BufferPlace()))

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes for the person who trains on the data."""
        among = "shuffled and packed" if self.spec.shuffle and self.spec.packing else "shuffled" if self.spec.shuffle else ""
        words = f"data are read as they come, {self._buffer_rows} rows at once{among and f', {among} among themselves'}"
        of_first = self._cursor.stretch.tokens.notices if self._cursor.begun else ()
        held_out = self.held_out.notices if self.held_out else ()
        return (words, *(f"first rows: {each}" for each in of_first), *(f"eval_data: {each}" for each in held_out))

    @property
    def left_out(self) -> tuple[str, ...]:
        """What was cut, dropped and skipped so far, up to the end of the buffer."""
        if not self._cursor.begun:
            return ()
        seen = self._cursor.stretch.end
        counts = {
            f"cut at sequence_length {self.spec.sequence_length}": seen.cut,
            "dropped, because nothing in them is trained": seen.dropped,
            "skipped, because their turns cannot be told": seen.skipped,
        }
        return tuple(f"{found} of {seen.read} samples were {words}" for words, found in counts.items() if found)

    def first_rows(self, steps: int) -> PackedRows:
        """Return the lengths of the samples in the rows of the first steps, as far as the first buffer has them."""
        buffer = self._cursor.stretch
        return first_rows([lengths_of(buffer.rows, buffer.tokens.lengths, self.spec.sequence_length)], self.spec, steps)

    def next_batch(self) -> Batch:
        """Return the next step's rows and move on. Raises as `Batches.next_batch`."""
        return joined_batch([(buffer.tokens, row) for buffer, row in self._cursor.take(self.spec.rows_per_step)], self.spec)

    def state(self) -> dict[str, Any]:
        """Return the position, as a value that JSON can hold."""
        buffer = self._cursor.stretch
        return {
            **self._choices(),
            "place": asdict(buffer.begin),
            "row_index": self._cursor.row_index,
            "digest": self._digest(buffer),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to the position where `state` was taken. Cost: rows before its buffer are read past, and the buffer is filled.
        Raises as `Batches.restore`.
        """
        with read_position(state, self._choices()):
            place, row_index = BufferPlace.of(state["place"]), int(state["row_index"])
            digest = str(state["digest"])
        self._open = None
        buffer = self._filled(place)
        if self._digest(buffer) != digest or not 0 <= row_index <= len(buffer.rows):
            where = f"{self._sources[place.source].name}, row {place.row}" if place.source < len(self._sources) else "the end"
            raise DataError(
                f"cannot continue the data where the run stopped: the rows from {where} on give other tokens than then. "
                "Give the same data and tokenizer, or start a new run"
            )
        self._cursor.go_to(buffer, row_index)

    def _choices(self) -> dict[str, Any]:
        return {"streamed_rows": self._buffer_rows, **super()._choices()}

    @staticmethod
    def _digest(buffer: _Buffer) -> str:
        return f"{buffer.tokens.info.digest[:32]}-{buffer.rows.checksum:08x}"

    def _filled(self, place: BufferPlace) -> _Buffer:
        """Return the next buffer with something to train, from `place` on.

        Raises:
            DataError: rows cannot be read, too many cannot be told, or none of all sources has anything to train.
        """
        begun, spec = place, self.spec
        while True:
            if place.source >= len(self._sources):
                place = replace(place, epoch=place.epoch + 1, buffer=0, source=0, row=0)
            reached = [(place.source, place.row)]
            samples = Samples(self._parts(reached), self._tokenizer, spec)
            pad_id = pad_id_of(self._tokenizer)
            tokens = held_tokens(samples, sequence_length=spec.sequence_length, pad_id=pad_id, remarks=samples.remarks)
            info, (source, row) = tokens.info, reached[0]
            end = BufferPlace(
                epoch=place.epoch,
                buffer=place.buffer + 1,
                source=source,
                row=row,
                read=place.read + samples.count,
                skipped=place.skipped + samples.num_unmarked,
                cut=place.cut + info.cut_samples,
                dropped=place.dropped + info.dropped_samples,
            )
            samples.refuse_unmarked(end.skipped, end.read)
            if len(tokens):
                rows = rows_of(tokens.lengths, spec, place.epoch + _BUFFER * place.buffer)
                return _Buffer(rows, place, end, self._fit(tokens))
            if end.epoch > begun.epoch + 1:
                names = ", ".join(map(str, spec.paths))
                raise DataError(f"{names}: no token of the data set is trained: {'; '.join(info.losses) or 'it has no rows'}")
            place = end

    def _parts(self, reached: list[tuple[int, int]]) -> Iterator[Source]:
        """Yield the parts of sources that fill a buffer; each is read to its end before the next is asked for. `reached` has
        the place where the next one begins, and gets the place behind what was read.
        """
        left = self._buffer_rows
        while left and reached[0][0] < len(self._sources):
            number, row = reached[0]
            source = self._sources[number]
            rows = self._open[1] if self._open and self._open[0] == reached[0] else source.read(row)
            first = next(rows, None)
            if first is None and row:
                reached[0] = (number + 1, 0)
                continue
            part = _ReadRows(chain([] if first is None else [first], islice(rows, left - 1)))
            if row and number not in self._firsts:
                self._firsts[number] = next(source.read(), None)
            yield replace(source, read=part, first=self._firsts.get(number))
            left -= part.count
            reached[0] = (number, row + part.count)
            self._open = (reached[0], rows)


class _ReadRows:
    """Rows that are read once, and how many they were."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows
        self.count = 0

    def __call__(self, skip: int = 0) -> Iterator[Row]:
        for row in self._rows:
            self.count += 1
            yield row
