"""Data sets of a Trainer as token rows: the forms of data that `headrace train` reads, by the same code.

Invariant: a row has the tokens and targets that `headrace train` gives the same row of a file.
"""

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from headrace.data import DataSpec, TokenSet
from headrace.data.batches.open_data import fitting, open_tokenizer, read_chat_template, read_model_config
from headrace.data.chat.chat_template import asks_for_time
from headrace.data.chat.columns import Columns
from headrace.data.chat.forms import MASKS
from headrace.data.read.sources import Source, read_rows, rows_after
from headrace.data.read.tables import rows_of_data_set
from headrace.data.tokens.tokenize import tokens_of
from headrace.data.values.packing import packed_rows
from headrace.data.values.values import IGNORED, Kind, Row, Tokenizer
from headrace.integrations.transformers.loop_state import border_of_run, day_of
from headrace.runs.engines import why_not_packed
from headrace.terms.errors import ConfigError, DataError
from headrace.terms.options.border import Border
from headrace.terms.options.options import DEFAULT_SEQUENCE_LENGTH
from headrace.terms.packed_rows import PackedRows


class TokenRows(Dataset[dict[str, Any]]):
    """Samples as `input_ids` and `labels`; packed, several in a row, with `position_ids` that begin again at each."""

    def __init__(self, tokens: TokenSet, length: int | None = None) -> None:
        """Take samples as rows; with a `length`, pack them into rows of at most so many tokens."""
        self.tokens, self._length = tokens, length
        self._packs = None if length is None else packed_rows(tokens.lengths, length, seed=None, epoch=0)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self._length or int(self.tokens.lengths.max())

    @property
    def are_conversations(self) -> bool:
        """Whether the samples are what a chat template made."""
        return "messages" in self.tokens.info.kinds

    def first(self, count: int) -> PackedRows | None:
        """Return the lengths of the samples in the first `count` rows, for a plan; None if nothing is packed."""
        if self._packs is None or self._length is None:
            return None
        rows = []
        for row in range(min(count, len(self))):
            lengths = self.tokens.lengths[self._packs.row(row)].tolist()
            left = self._length - sum(lengths)
            rows.append((*lengths, left) if left else tuple(lengths))
        return PackedRows(self._length, tuple(rows))

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


def with_marks(tokenizer: Any, args: Any) -> Any:
    """Return `tokenizer` with the chat template and the marks that an SFTConfig names; a copy, where it names any.

    Raises:
        ConfigError: the template cannot be read, or a mark is no token of the vocabulary.
    """
    asked = {name: getattr(args, name, None) for name in ("eos_token", "pad_token")}
    template = getattr(args, "chat_template_path", None)
    if template is None and not any(asked.values()):
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    for name, token in asked.items():
        if token and tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id):
            raise ConfigError(f"{name}: {token!r} is no token of the model's vocabulary; give one that is")
        if token:
            setattr(tokenizer, name, token)
    if template is not None:
        path = Path(template)
        tokenizer.chat_template = open_tokenizer(path).chat_template if path.is_dir() else read_chat_template(path)
    return tokenizer


@dataclass(frozen=True)
class RightPadding:
    """A data collator: rows of `TokenRows`, padded on the right to the longest; packed ones, to `length`."""

    pad_id: int
    length: int

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the batch that `headrace train` makes of these rows."""
        packed = "position_ids" in rows[0]
        length = self.length if packed else max(len(row["input_ids"]) for row in rows)
        mask = "token_mask" if packed else "attention_mask"
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

    `text_column` is the name of the column of texts, `day` what a chat template hears that asks for the date, `border` the rule
    for tokens of prompt and completion. `whole` names the kinds of rows of which every token is trained. `marks` says what
    SFTConfig of TRL trains of a row: None for other arguments. With a `shuffled` seed, data sets are shuffled first.
    """

    tokenizer: Tokenizer
    most_tokens: int
    cache: Path
    text_column: str = "text"
    day: str | None = None
    border: Border = Border.APART
    whole: frozenset[Kind] = frozenset()
    marks: "Marks | None" = None
    shuffled: int | None = None
    model: Path
    packing: bool = False
    eval_packing: bool = False

    @classmethod
    def of(cls, args: Any, tokenizer: Any, model: Path, cache: Path, most_tokens: int | None) -> "Reading":
        """Return how `args` want rows: TrainingArguments those of `headrace train`, SFTConfig of TRL its own."""
        values = read_model_config(model)
        positions = next((values[name] for name in ("max_position_embeddings", "n_positions") if values.get(name)), None)
        usual = positions or DEFAULT_SEQUENCE_LENGTH
        whole = {Kind.CHAT: "assistant_only_loss", Kind.COMPLETION: "completion_only_loss"}
        packing = bool(getattr(args, "packing", False))
        return cls(
            tokenizer=with_marks(tokenizer, args),
            most_tokens=min(most_tokens or getattr(args, "max_length", None) or usual, usual),
            cache=cache,
            text_column=getattr(args, "dataset_text_field", None) or "text",
            day=day_of(Path(args.output_dir)) or date.today().isoformat(),
            border=border_of_run(Path(args.output_dir)) or (Border.JOINT if _is_of_trl(args) else Border.APART),
            whole=frozenset(kind for kind, name in whole.items() if getattr(args, name, None) is False),
            marks=Marks(args.completion_only_loss, args.assistant_only_loss) if hasattr(args, "assistant_only_loss") else None,
            shuffled=args.seed if getattr(args, "shuffle_dataset", False) else None,
            model=model,
            packing=packing,
            eval_packing=packing if (held_out := getattr(args, "eval_packing", None)) is None else held_out,
        )

    @property
    def dated(self) -> str | None:
        """The day that templates are told; None if this one does not ask."""
        return self.day if asks_for_time(self.tokenizer) else None

    def all_rows(self, train: Any, held_out: Any) -> tuple[Any, Any, RightPadding]:
        """Return the data sets as rows, and what makes batches of them. Raises as `rows`."""
        trained = self.rows(train, "train_dataset") if train is not None else None
        others = held_out
        if isinstance(held_out, Mapping):
            others = {name: self.rows(each, f"eval_dataset {name}") for name, each in held_out.items()}
        elif held_out is not None:
            others = self.rows(held_out, "eval_dataset")
        any_rows = trained or (next(iter(others.values())) if isinstance(others, dict) else others)
        return trained, others, RightPadding(any_rows.tokens.info.pad_id if any_rows else 0, self.most_tokens)

    def rows(self, data: Any, name: str) -> TokenRows:
        """Return the samples of a data set: one of `datasets`, or anything with a length and rows that are mappings.

        Raises:
            DataError: it cannot be read, or no token of it is trained.
            ConfigError: it is to be packed, and the model does not keep samples of one row apart.
        """
        if isinstance(data, TokenRows):
            return data
        packing = self.packing if name == "train_dataset" else self.eval_packing
        if packing and (reason := why_not_packed(self.model, self.most_tokens)):
            raise ConfigError(f"packing: {self.model.name} cannot keep samples of one row apart: {reason}; leave packing out")
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise DataError(f"{name}: a {type(data).__name__} has no length; give a data set that has one, or load it whole")
        if self.shuffled is not None:
            data = _shuffled(data, name, self.shuffled)
        spec = DataSpec(paths=(name,), sequence_length=self.most_tokens, tokens_per_step=self.most_tokens)
        source = self._source(data, name)
        kind, rows = read_rows(source)
        if self.marks is not None:
            self.marks.check(kind, rows)
        everything = kind in self.whole
        spec = replace(spec, template_date=self.dated, everything=everything, border=self.border)
        tokens = fitting(tokens_of([source], spec, self.tokenizer, self.cache), self.model)
        return TokenRows(tokens, self.most_tokens if packing else None)

    def _source(self, data: Any, name: str) -> Source:
        renamed = {} if self.text_column == "text" else {"text": self.text_column}
        if hasattr(data, "_fingerprint") and hasattr(data, "with_format"):  # of `datasets`
            columns = renamed if self.text_column in data.column_names else {}
            stamp = f"{data._fingerprint} {columns}"
            found = partial(rows_of_data_set, name, lambda: data, "cannot be read", Columns(columns))
        else:
            stamp, found = _digest(data), partial(_rows, data, name, renamed)
        masks = () if Kind.COMPLETION in self.whole else ("completion_mask",)
        read = rows_after(lambda: (_labelled(row, (*masks, "assistant_masks")) for row in found()))
        return Source(name, f"{stamp} {masks}", read)


@dataclass(frozen=True)
class Marks:
    """What SFTConfig of TRL asks to train of a row."""

    completion_only: bool | None
    assistant_only: bool

    def check(self, kind: Kind, rows: Iterator[Row]) -> None:
        """Refuse rows of which other tokens would be trained than these.

        Raises:
            DataError: there is such a row.
        """
        if self.assistant_only and kind is Kind.TEXT:
            raise DataError(f"{next(rows).place}: assistant_only_loss takes conversations, and this is a text; leave it out")
        for row in rows if kind is Kind.COMPLETION else ():
            turns = row.values["completion"]
            if not isinstance(turns, list) and self.assistant_only:
                raise DataError(f"{row.place}: assistant_only_loss takes conversations, and this is a text; leave it out")
            if isinstance(turns, list) and self.assistant_only and self.completion_only is False:
                raise DataError(
                    f"{row.place}: by completion_only_loss=False, all that the assistant says in prompt and completion is "
                    "trained; give both as one conversation, in a column messages"
                )
            if isinstance(turns, list) and self.completion_only is not False and not self.assistant_only and len(turns) != 1:
                raise DataError(
                    f"{row.place}: its completion has {len(turns)} messages, and completion_only_loss trains all of them; "
                    "HeadraceTrainer trains what the assistant says there: ask for it by assistant_only_loss=True"
                )


def _shuffled(data: Any, name: str, seed: int) -> Any:
    if not hasattr(data, "shuffle"):
        raise DataError(f"{name}: shuffle_dataset takes a data set of `datasets`, found {type(data).__name__}; leave it out")
    return data.shuffle(seed=seed)


def _is_of_trl(args: Any) -> bool:
    """Return whether arguments are an SFTConfig."""
    return hasattr(args, "completion_only_loss")


def _rows(data: Any, name: str, renamed: Mapping[str, str]) -> Iterator[Row]:
    ours = {theirs: our for our, theirs in renamed.items()}
    for index in range(len(data)):
        row = data[index]
        if not isinstance(row, Mapping):
            raise DataError(f"{name}, row {index}: expected columns by name, found {type(row).__name__}")
        values = {ours.get(column, str(column)): _plain(value) for column, value in row.items()}
        yield Row(f"{name}, row {index}", values)


def _labelled(row: Row, masks: Sequence[str]) -> Row:
    """Return `row` with labels where TRL's `masks` say what is trained."""
    ids, given = row.values.get("input_ids"), [row.values[name] for name in masks if row.values.get(name) is not None]
    if ids is None:
        return row
    others = {name: value for name, value in row.values.items() if name not in MASKS}
    if not given or row.values.get("labels") is not None:
        return replace(row, values=others)
    if any(len(mask) != len(ids) for mask in given):
        raise DataError(f"{row.place}: its masks must have a number for each of its {len(ids)} input_ids")
    labels = [token if all(marks) else IGNORED for token, *marks in zip(ids, *given, strict=True)]
    return replace(row, values={**others, "labels": labels})


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


def longest_of(train: Any, held_out: Any) -> int:
    """Return the tokens of the longest row of all data sets. Raises as `longest_row`."""
    others = held_out if isinstance(held_out, Mapping) else {"eval_dataset": held_out}
    sets = {"train_dataset": train, **others}
    found = [each.longest if isinstance(each, TokenRows) else longest_row(each, name) for name, each in sets.items() if each]
    return max(found, default=2)
