"""Token sets to batches, endlessly; the stream's position is a small value that a run commits with its weights.

The invariant: after `restore(state)` come the batches that followed when `state()` was taken, bit for bit, or `restore` raises.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data.values.mixing import drawn
from headrace.data.values.packing import EpochRows, packed_rows, single_rows
from headrace.data.values.tokens import EARLIER_FORMATS, FORMAT_VERSION, TokenSet
from headrace.data.values.values import IGNORED, Batch, DataSpec, Sample
from headrace.terms.errors import DataError
from headrace.terms.packed_rows import PackedRows

# So many rows say how many samples of one length rows hold.
_FIRST_ROWS = 1024
_COUNTERS = ("steps", "tokens", "trained_tokens")


class BatchStream:
    """Batches of `spec.rows_per_step` rows each, epoch after epoch; a step that an epoch cannot fill goes on in the next.

    Cost: an epoch's rows are laid out when its first batch is asked for; packed, that takes about a second for a million
    samples.
    """

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
        self._tokens = tokens
        self._earlier = earlier
        self._spec = spec
        self._epoch = 0
        self._row_index = 0
        self._rows = self._lay_out(0)
        self._rows_of_first_epoch = len(self._rows)
        self._counters = dict.fromkeys(_COUNTERS, 0)

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes for the person who trains on the data."""
        share = 0.0 if self._spec.packing else self._padding_share()
        wasted = (f"not packed: {share:.0%} of the tokens computed are padding",) if share >= 0.01 else ()
        held_out = self._tokens.held_out.notices if self._tokens.held_out else ()
        return (*self._tokens.notices, *wasted, *(f"eval_data: {notice}" for notice in held_out))

    @property
    def held_out(self) -> TokenSet | None:
        """The samples that are evaluated and never trained; None if there are none."""
        return self._tokens.held_out

    left_out = ()  # it is known before, and in `notices`

    @property
    def digest(self) -> str:
        """A digest of the samples that are trained."""
        return self._tokens.info.digest

    def from_the_start(self) -> "BatchStream":
        """Return a stream of the same samples, at its first row."""
        return BatchStream(self._tokens, self._spec)

    @property
    def spec(self) -> DataSpec:
        """What the data were asked for."""
        return self._spec

    def epochs_ended(self, steps: int) -> int:
        """Return how many epochs, each as long as the first one, end within so many steps."""
        return steps * self._spec.rows_per_step // self._rows_of_first_epoch

    @property
    def template_date(self) -> str | None:
        """The day that the chat template was told; None if it does not ask."""
        return self._spec.template_date

    @property
    def steps_per_epoch(self) -> float:
        """Steps of the first epoch. Later epochs are packed differently, and may differ by a few rows."""
        return self._rows_of_first_epoch / self._spec.rows_per_step

    @property
    def epoch(self) -> float:
        """Epochs given out: 1.25 is a quarter into the second epoch."""
        return self._epoch + self._row_index / len(self._rows)

    def first_rows(self, steps: int) -> PackedRows:
        """Return the lengths of the samples in the rows of a run of so many steps; of a long run, in those of its first steps.
        What fills a row up counts as a sample, as in a batch.
        """
        return first_rows(map(self._lengths_in, count()), self._spec, steps)

    def _lengths_in(self, epoch: int) -> Iterator[tuple[int, ...]]:
        rows = self._rows if epoch == self._epoch else self._lay_out(epoch)
        return lengths_of(rows, self._tokens.lengths, self._spec.sequence_length)

    def next_batch(self) -> Batch:
        """Return the next step's rows and move on.

        Raises:
            CorruptData: the token cache is no longer what was written.
        """
        rows = [self._next_row() for _ in range(self._spec.rows_per_step)]
        batch = batch_of(self._tokens, rows, self._spec)
        self._counters["steps"] += 1
        self._counters["tokens"] += batch.num_tokens
        self._counters["trained_tokens"] += batch.num_trained_tokens
        return batch

    def state(self) -> dict[str, Any]:
        """Return the stream's position, as a value that JSON can hold."""
        return {
            **self._identity(),
            "rules": self._tokens.info.version,
            "epoch": self._epoch,
            "row_index": self._row_index,
            "row_checksum": self._rows.checksum,
            "counters": dict(self._counters),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to the position where `state` was taken. Cost: the layout of one epoch; no batch is made again.

        `tokens_per_step` may differ from that time: the next rows are the same. If the run began with one of the earlier token
        sets, it goes on with that.

        Raises:
            DataError: samples, sequence length, seed or order differ from that time, or `state` is no position of a stream. The
                stream then stays where it was.
        """
        begun, kept = state.get("samples_digest"), self._tokens
        self._tokens = next((each for each in (kept, *self._earlier) if each.info.digest == begun), kept)
        try:
            self._restore(state)
        except DataError:
            self._tokens = kept
            raise
        if self._tokens is not kept:
            self._rows_of_first_epoch = len(self._lay_out(0))

    def _restore(self, state: Mapping[str, Any]) -> None:
        begun = state.get("samples_digest")
        if begun not in (None, self._tokens.info.digest) and state.get("rules", EARLIER_FORMATS[-1]) != FORMAT_VERSION:
            raise DataError(
                "cannot continue the data where the run stopped: its tokens were made by an earlier version of the rules "
                "(docs/data.md), and the cache no longer has them. Start a new run, or resume with that version"
            )
        for name, value in self._identity().items():
            if name not in state or state[name] != value:
                raise DataError(
                    f"cannot continue the data where the run stopped: {name} was {state.get(name, '(unknown)')!r}, now it is "
                    f"{value!r}. Give the same data, tokenizer and data options, or start a new run"
                )
        try:
            epoch, row_index, checksum = int(state["epoch"]), int(state["row_index"]), int(state["row_checksum"])
            counters = {name: int(state["counters"][name]) for name in _COUNTERS}
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the position in the data is damaged ({error!r}), found {dict(state)}; start a new run") from error
        rows = self._lay_out(epoch) if epoch >= 0 else None
        if rows is None or rows.checksum != checksum or not 0 <= row_index <= len(rows):
            raise DataError(
                f"cannot continue the data where the run stopped: epoch {epoch}, row {row_index} of the saved position is "
                "not in the order that this version makes (another NumPy?). Use the versions that the run began with"
            )
        self._epoch, self._row_index, self._rows, self._counters = epoch, row_index, rows, counters

    @property
    def by_earlier_rules(self) -> bool:
        """Whether the tokens were made by earlier rules, with which the run began."""
        return self._tokens.info.version != FORMAT_VERSION

    def _identity(self) -> dict[str, Any]:
        spec = self._spec
        return {
            "samples_digest": self._tokens.info.digest,
            "sequence_length": spec.sequence_length,
            "seed": spec.seed,
            "packing": spec.packing,
            "shuffle": spec.shuffle,
            **({"weights": list(spec.weights)} if spec.weights else {}),
            **({"held_out_digest": self._tokens.held_out.info.digest} if self._tokens.held_out else {}),
        }

    def _lay_out(self, epoch: int) -> EpochRows:
        spec = self._spec
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
        starts = np.arange(0, len(lengths), self._spec.rows_per_step)
        rows = np.diff(np.append(starts, len(lengths)))
        return 1 - float(lengths.sum()) / float((rows * np.maximum.reduceat(lengths, starts)).sum())

    def _next_row(self) -> NDArray[np.int64]:
        if self._row_index == len(self._rows):
            self._rows = self._lay_out(self._epoch + 1)
            self._epoch += 1
            self._row_index = 0
        row = self._rows.row(self._row_index)
        self._row_index += 1
        return row


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
    return _batch(input_ids, labels, int(token_mask.sum()), position_ids=position_ids, token_mask=token_mask)


def padded_batch(samples: Sequence[Sample], pad_id: int) -> Batch:
    """Return one row for each of `samples`, padded on the right to the longest of them."""
    shape = (len(samples), max(len(sample.input_ids) for sample in samples))
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    for row, sample in enumerate(samples):
        attention_mask[row, : _fill(sample, input_ids[row], labels[row])] = 1
    return _batch(input_ids, labels, int(attention_mask.sum()), attention_mask=attention_mask)


def batch_of(tokens: TokenSet, rows: Sequence[NDArray[np.int64]], spec: DataSpec) -> Batch:
    """Return the batch of some rows of one token set, as `spec` has them."""
    batch = joined_batch([(tokens, rows)], spec)
    if spec.packing:
        return batch
    places = [int(row[0]) for row in rows]
    return replace(batch, samples=np.array(places), desirable=tokens.desirable(places))


def joined_batch(parts: Sequence[tuple[TokenSet, Sequence[NDArray[np.int64]]]], spec: DataSpec) -> Batch:
    """Return one batch of rows of several token sets."""
    samples = [[tokens.sample(index) for index in row.tolist()] for tokens, rows in parts for row in rows]
    pad_id = parts[0][0].info.pad_id
    return (
        packed_batch(samples, pad_id, spec.sequence_length)
        if spec.packing
        else padded_batch([row[0] for row in samples], pad_id)
    )


def _fill(sample: Sample, input_ids: NDArray[np.int64], labels: NDArray[np.int64]) -> int:
    length = len(sample.input_ids)
    input_ids[:length] = sample.input_ids
    labels[:length] = np.where(sample.trained, sample.input_ids, IGNORED)
    return length


def _batch(
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    num_tokens: int,
    *,
    position_ids: NDArray[np.int64] | None = None,
    attention_mask: NDArray[np.int64] | None = None,
    token_mask: NDArray[np.int64] | None = None,
) -> Batch:
    return Batch(
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        attention_mask=attention_mask,
        token_mask=token_mask,
        num_tokens=num_tokens,
        num_trained_tokens=int(np.count_nonzero(labels != IGNORED)),
    )
