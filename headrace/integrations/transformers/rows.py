"""Data sets of a Trainer as token rows: the forms of data that `headrace train` reads, by the same code.

Invariant: a row has the tokens and targets that `headrace train` gives the same row of a file.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from headrace.data import DataSpec, TokenSet
from headrace.data.chat_template import asks_for_time
from headrace.data.packing import EpochRows, packed_rows
from headrace.data.sources import Source
from headrace.data.tables import rows_of_data_set
from headrace.data.tokenize import tokens_of
from headrace.data.values import IGNORED, Row, Tokenizer
from headrace.terms.errors import DataError


class TokenRows(Dataset[dict[str, Any]]):
    """Samples as `input_ids` and `labels`; packed, several in a row, with `position_ids` that begin again at each."""

    def __init__(self, tokens: TokenSet, packs: EpochRows | None = None) -> None:
        self.tokens, self._packs = tokens, packs

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.tokens.lengths.max())

    def packed(self, sequence_length: int) -> "TokenRows":
        """Return the same samples in rows of at most `sequence_length` tokens."""
        return TokenRows(self.tokens, packed_rows(self.tokens.lengths, sequence_length, seed=None, epoch=0))

    def __len__(self) -> int:
        return len(self.tokens) if self._packs is None else len(self._packs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        places = [index] if self._packs is None else self._packs.row(index).tolist()
        samples = [self.tokens.sample(place) for place in places]
        ids = np.concatenate([sample.input_ids for sample in samples]).astype(np.int64)
        trained = np.concatenate([sample.trained for sample in samples])
        row = {"input_ids": ids, "labels": np.where(trained, ids, IGNORED)}
        if self._packs is not None:
            row["position_ids"] = np.concatenate([np.arange(len(sample.input_ids)) for sample in samples])
        return row


@dataclass(frozen=True)
class RightPadding:
    """A data collator: rows of `TokenRows`, padded on the right to the longest, or where samples are packed to `length`."""

    pad_id: int
    length: int | None = None

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the batch that `headrace train` makes of these rows."""
        length = self.length or max(len(row["input_ids"]) for row in rows)
        mask = "attention_mask" if self.length is None else "token_mask"
        ones = [{**row, mask: np.ones_like(row["input_ids"])} for row in rows]
        return {
            name: torch.from_numpy(np.stack([self._filled(name, np.asarray(row[name]), length) for row in ones]))
            for name in ones[0]
        }

    def _filled(self, name: str, values: Any, length: int) -> Any:
        left = length - len(values)
        fill = {"input_ids": self.pad_id, "labels": IGNORED}.get(name, 0)
        more = np.arange(left) if name == "position_ids" else np.full(left, fill)
        return np.concatenate([values, more.astype(np.int64)])


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How data sets become rows: by which tokenizer, cut at `most_tokens`; the tokens are kept in `cache`.

    `text_column` is the name of the column of texts, `day` what a chat template hears that asks for the date.
    """

    tokenizer: Tokenizer
    most_tokens: int
    cache: Path
    text_column: str = "text"
    day: str | None = None

    @property
    def dated(self) -> str | None:
        """The day that templates are told; None if this one does not ask."""
        return self.day if asks_for_time(self.tokenizer) else None

    def rows(self, data: Any, name: str) -> TokenRows:
        """Return the samples of a data set: one of `datasets`, or anything with a length and rows that are mappings.

        Raises:
            DataError: it cannot be read, or no token of it is trained.
        """
        if isinstance(data, TokenRows):
            return data
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise DataError(f"{name}: a {type(data).__name__} has no length; give a data set that has one, or load it whole")
        spec = DataSpec(paths=(name,), sequence_length=self.most_tokens, tokens_per_step=self.most_tokens)
        spec = replace(spec, template_date=self.dated)
        return TokenRows(tokens_of([self._source(data, name)], spec, self.tokenizer, self.cache))

    def _source(self, data: Any, name: str) -> Source:
        renamed = {} if self.text_column == "text" else {"text": self.text_column}
        if hasattr(data, "_fingerprint") and hasattr(data, "with_format"):  # of `datasets`
            columns: Mapping[str, str] = renamed if self.text_column in data.column_names else {}
            words = "cannot be read"
            return Source(name, f"{data._fingerprint} {columns}", lambda: rows_of_data_set(name, lambda: data, words, columns))
        return Source(name, _digest(data), lambda: _rows(data, name, renamed))


def _rows(data: Any, name: str, renamed: Mapping[str, str]) -> Iterator[Row]:
    ours = {theirs: our for our, theirs in renamed.items()}
    for index in range(len(data)):
        row = data[index]
        if not isinstance(row, Mapping):
            raise DataError(f"{name}, row {index}: expected columns by name, found {type(row).__name__}")
        values = {ours.get(column, str(column)): _plain(value) for column, value in row.items()}
        yield Row(f"{name}, row {index}", values)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _digest(data: Any) -> str:
    """Return a digest of all rows: nothing else says whether they are those of another time."""
    digest = hashlib.sha256()
    for index in range(len(data)):
        row = data[index]
        plain = {name: _plain(value) for name, value in row.items()} if isinstance(row, Mapping) else repr(row)
        digest.update(json.dumps(plain, default=repr).encode() + b"\n")
    return digest.hexdigest()


def longest_row(data: Any, name: str) -> int:
    """Return the most `input_ids` that a row of a tokenised data set has.

    Raises:
        DataError: it has no length, or rows without `input_ids`.
    """
    try:
        if hasattr(data, "column_names"):
            lengths = (len(ids) for batch in data.select_columns(["input_ids"]).iter(512) for ids in batch["input_ids"])
        else:
            lengths = (len(data[index]["input_ids"]) for index in range(len(data)))
        return max(lengths)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{name}: its longest row cannot be found ({error}); give sequence_length, or rows with input_ids"
        ) from error
