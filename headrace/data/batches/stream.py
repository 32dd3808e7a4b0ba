"""Token sets to batches, endlessly; the stream's position is a small value that a run commits with its weights.

Invariants: those of `batches.py`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain, count, islice
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.batches.batches import Batches, Cursor, Epoch, read_position
from headrace.data.values.packing import EpochRows, packed_rows, single_rows
from headrace.data.values.tokens import EARLIER_FORMATS, FORMAT_VERSION, TokenSet
from headrace.data.values.values import IGNORED, Batch, DataSpec, Sample
from headrace.terms.errors import DataError
from headrace.terms.packed_rows import PackedRows

# So many rows say how many samples of one length rows hold.
_FIRST_ROWS = 1024
# Keeps the orders of walks through sources apart from those of epochs and of held-out samples.
_WALK = 1 << 33


class BatchStream(Batches):
    """Batches of `spec.rows_per_step` rows each, epoch after epoch; a step that an epoch cannot fill goes on in the next.

    Cost: an epoch's rows are laid out when its first batch is asked for; packed, that takes about a second for a million
    samples.
    """

    steps_per_epoch: float  # never None here
    _epoch_rows: int

    def __init__(self, tokens: TokenSet, spec: DataSpec, earlier: Sequence[TokenSet] = ()) -> None:
        """Start at the first row of epoch 0. `earlier` are token sets that a run may have begun with.

        Raises:
            DataError: no samples, or samples longer than a row.
        """
        if len(tokens) == 0:
            raise DataError("the token set holds no sample; at least one is needed")
        longest = int(tokens.lengths.max())
        if longest > spec.sequence_length:
            raise DataError(
                f"a sample has {longest} tokens, a row only {spec.sequence_length}: they were tokenised for sequence_length "
                f"{tokens.info.sequence_length}. Tokenise them again for {spec.sequence_length}"
            )
        super().__init__(spec, tokens.held_out, spec.rows_per_step, None)
        self._earlier = earlier
        self._use(tokens)
        self._cursor = Cursor[Epoch](lambda last: self._epoch(last.number + 1 if last else 0))
        self._epoch_rows = len(self._cursor.stretch.rows)

    def _use(self, tokens: TokenSet) -> None:
        self._tokens, self.held_out = tokens, tokens.held_out
        self.by_earlier_rules = tokens.info.version != FORMAT_VERSION

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes for the person who trains on the data."""
        share = 0.0 if self.spec.packing else self._padding_share()
        wasted = (f"not packed: {share:.0%} of the tokens computed are padding",) if share >= 0.01 else ()
        held_out = self.held_out.notices if self.held_out else ()
        return (*self._tokens.notices, *wasted, *(f"eval_data: {notice}" for notice in held_out))

    @property
    def digest(self) -> str:
        """A digest of the samples that are trained."""
        return self._tokens.info.digest

    def from_the_start(self) -> "BatchStream":
        """Return a stream of the same samples, at its first row."""
        return BatchStream(self._tokens, self.spec)

    def first_rows(self, steps: int) -> PackedRows:
        """Return the lengths of the samples in the rows of a run of so many steps; of a long run, in those of its first steps.
        What fills a row up counts as a sample, as in a batch.
        """
        return first_rows(map(self._lengths_in, count()), self.spec, steps)

    def _lengths_in(self, epoch: int) -> Iterator[tuple[int, ...]]:
        at_hand = self._cursor.stretch
        rows = at_hand.rows if epoch == at_hand.number else self._lay_out(epoch)
        return lengths_of(rows, self._tokens.lengths, self.spec.sequence_length)

    def next_batch(self) -> Batch:
        """Return the next step's rows and move on. Raises as `Batches.next_batch`."""
        return batch_of(self._tokens, [row for _, row in self._cursor.take(self.spec.rows_per_step)], self.spec)

    def state(self) -> dict[str, Any]:
        """Return the stream's position, as a value that JSON can hold."""
        epoch = self._cursor.stretch
        return {
            **self._choices(),
            "rules": self._tokens.info.version,
            "epoch": epoch.number,
            "row_index": self._cursor.row_index,
            "row_checksum": epoch.rows.checksum,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to the position where `state` was taken. Cost: the layout of one epoch; no batch is made again.

        `tokens_per_step` may differ from that time: the next rows are the same. If the run began with one of the earlier token
        sets, it goes on with that. Raises as `Batches.restore`.
        """
        begun, kept = state.get("samples_digest"), self._tokens
        self._use(next((each for each in (kept, *self._earlier) if each.info.digest == begun), kept))
        try:
            self._restore(state)
        except DataError:
            self._use(kept)
            raise
        if self._tokens is not kept:
            self._epoch_rows = len(self._lay_out(0))

    def _restore(self, state: Mapping[str, Any]) -> None:
        begun = state.get("samples_digest")
        if begun not in (None, self.digest) and state.get("rules", EARLIER_FORMATS[-1]) != FORMAT_VERSION:
            raise DataError(
                "cannot continue the data where the run stopped: its tokens were made by an earlier version of the rules "
                "(docs/data.md), and the cache no longer has them. Start a new run, or resume with that version"
            )
        with read_position(state, self._choices()):
            epoch, row_index, checksum = (int(state[name]) for name in ("epoch", "row_index", "row_checksum"))
        rows = self._lay_out(epoch) if epoch >= 0 else None
        if rows is None or rows.checksum != checksum or not 0 <= row_index <= len(rows):
            raise DataError(
                f"cannot continue the data where the run stopped: epoch {epoch}, row {row_index} of the saved position is "
                "not in the order that this version makes (another NumPy?). Use the versions that the run began with"
            )
        self._cursor.go_to(Epoch(rows, epoch), row_index)

    def _choices(self) -> dict[str, Any]:
        return {"samples_digest": self.digest, **super()._choices()}

    def _epoch(self, number: int) -> Epoch:
        return Epoch(self._lay_out(number), number)

    def _lay_out(self, epoch: int) -> EpochRows:
        spec = self.spec
        seed = spec.seed if spec.shuffle else None
        if not spec.weights:
            return rows_of(self._tokens.lengths, spec, epoch)
        samples = drawn(self._tokens.ends, spec.weights, seed=seed, epoch=epoch)
        if not len(samples):
            raise DataError("weight: no sample occurs in an epoch; give more samples, or larger weights")
        rows = rows_of(self._tokens.lengths[samples], spec, epoch)
        return EpochRows(samples[rows.samples], rows.offsets)

    def _padding_share(self) -> float:
        """Return the share of the first epoch's positions that only pad rows of one sample to the longest row of their step."""
        lengths = self._tokens.lengths[self._lay_out(0).samples]
        starts = np.arange(0, len(lengths), self.spec.rows_per_step)
        rows = np.diff(np.append(starts, len(lengths)))
        return 1 - float(lengths.sum()) / float((rows * np.maximum.reduceat(lengths, starts)).sum())


def drawn(ends: Sequence[int], weights: Sequence[float], *, seed: int | None, epoch: int) -> NDArray[np.int64]:
    """Return the samples of an epoch. Those of source i end before sample `ends[i]`; with a `seed`, a walk's order is drawn.

    A source of n samples gives w n of them: the next ones of an endless walk through a fixed order. Invariant: after any number
    of epochs e, each sample has occurred floor(e w) or ceil(e w) times.
    """
    made, begin = [np.empty(0, dtype=np.int64)], 0
    for number, (end, weight) in enumerate(zip(ends, weights, strict=True)):
        samples, per_epoch = end - begin, Fraction(str(weight)) * (end - begin)
        order = np.arange(samples)
        if seed is not None:
            order = np.random.default_rng([seed, _WALK + number]).permutation(samples)
        if samples:
            walk = np.arange(floor(per_epoch * epoch), floor(per_epoch * (epoch + 1)), dtype=np.int64)
            made.append(begin + order[walk % samples])
        begin = end
    return np.concatenate(made)


def rows_of(lengths: NDArray[np.int64], spec: DataSpec, epoch: int) -> EpochRows:
    """Return the rows of samples of these lengths in an epoch, as `spec` has them."""
    seed = spec.seed if spec.shuffle else None
    if spec.packing:
        return packed_rows(lengths, spec.sequence_length, seed=seed, epoch=epoch)
    return single_rows(len(lengths), seed=seed, epoch=epoch, together=spec.samples_together)


def first_rows(epochs: Iterable[Iterator[tuple[int, ...]]], spec: DataSpec, steps: int) -> PackedRows:
    """Return the rows of the first steps: of some `epochs` come the lengths of the samples of each row."""
    per_step = spec.rows_per_step
    wanted = per_step * min(steps, max(1, _FIRST_ROWS // per_step)) if spec.packing else 0
    return PackedRows(spec.sequence_length, tuple(islice(chain.from_iterable(epochs), wanted)))


def lengths_of(rows: EpochRows, lengths: NDArray[np.int64], sequence_length: int) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of the samples of each row, and of what fills it up."""
    for row in range(len(rows)):
        tokens = lengths[rows.row(row)].tolist()
        left = sequence_length - sum(tokens)
        yield (*tokens, left) if left else tuple(tokens)


def packed_batch(rows: Sequence[Sequence[Sample]], pad_id: int, sequence_length: int) -> Batch:
    """Return rows of `sequence_length` with the samples of each of `rows` one after the other, positions restarting at each.

    The rest of a row is padding that has positions of its own, like another sample, so that nothing attends to it.
    """
    shape = (len(rows), sequence_length)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    position_ids = np.empty(shape, dtype=np.int64)
    token_mask = np.zeros(shape, dtype=np.int64)
    for row, samples in enumerate(rows):
        at = 0
        for sample in samples:
            length = _fill(sample, input_ids[row, at:], labels[row, at:])
            position_ids[row, at : at + length] = np.arange(length)
            at += length
        position_ids[row, at:] = np.arange(sequence_length - at)
        token_mask[row, :at] = 1
    return Batch(input_ids=input_ids, labels=labels, position_ids=position_ids, token_mask=token_mask)


def padded_batch(samples: Sequence[Sample], pad_id: int) -> Batch:
    """Return one row for each of `samples`, padded on the right to the longest of them."""
    shape = (len(samples), max(len(sample.input_ids) for sample in samples))
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    for row, sample in enumerate(samples):
        attention_mask[row, : _fill(sample, input_ids[row], labels[row])] = 1
    return Batch(input_ids=input_ids, labels=labels, attention_mask=attention_mask)


def batch_of(tokens: TokenSet, rows: Sequence[NDArray[np.int64]], spec: DataSpec) -> Batch:
    """Return the batch of some rows of one token set, as `spec` has them."""
    batch = joined_batch([(tokens, row) for row in rows], spec)
    if spec.packing:
        return batch
    places = [int(row[0]) for row in rows]
    return replace(batch, samples=np.array(places), desirable=tokens.desirable(places))


def joined_batch(rows: Sequence[tuple[TokenSet, NDArray[np.int64]]], spec: DataSpec) -> Batch:
    """Return one batch of rows, each of a token set."""
    samples = [[tokens.sample(index) for index in row.tolist()] for tokens, row in rows]
    pad_id = rows[0][0].info.pad_id
    if spec.packing:
        return packed_batch(samples, pad_id, spec.sequence_length)
    return padded_batch([row[0] for row in samples], pad_id)


def _fill(sample: Sample, input_ids: NDArray[np.int64], labels: NDArray[np.int64]) -> int:
    length = len(sample.input_ids)
    input_ids[:length] = sample.input_ids
    labels[:length] = np.where(sample.trained, sample.input_ids, IGNORED)
    return length
