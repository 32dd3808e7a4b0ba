"""The values of this package: the question (`DataSpec`), the contents of a file (`Row`, `Kind`), the model's input (`Batch`).

The invariant that all of them serve: a label is either `IGNORED` or equal to the input id at the same place. The model itself
shifts by one position, so the first token of a sample is never a target: no sample is predicted from another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.terms.errors import ConfigError
from headrace.terms.options.border import Border
from headrace.terms.options.data_source import DataSource, source_of
from headrace.terms.options.preferences import Preferences

IGNORED = -100
"""The label of a position that carries no loss: the default `ignore_index` of PyTorch's cross entropy."""

Ids = NDArray[np.int64]
"""Token ids, labels, positions or a mask of a batch, shape `(sequences, length)`."""


class Tokenizer(Protocol):
    """What this package uses of a Hugging Face tokenizer, fast or slow."""

    chat_template: Any
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    is_fast: bool

    @property
    def all_special_tokens(self) -> list[str]:
        """Return the texts that stand for special marks."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Return the tokens beside the vocabulary proper, special marks among them."""

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """Return the special marks by their roles, as chat templates ask for them."""

    def __call__(self, text: list[str], **options: Any) -> Any:
        """Return a mapping whose `input_ids` is one list of ids for each text."""

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Return a rendered conversation."""

    def get_chat_template(self, chat_template: str | None, tools: Any) -> str:
        """Return the template for conversations with or without `tools`."""

    def decode(self, token_ids: list[int], **options: Any) -> Any:
        """Return the text of `token_ids`."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write all files that make up the tokenizer."""


class Kind(Enum):
    """The accepted sets of columns; the first that a source has wins. The value is the columns that every sample needs."""

    TOKENS = ("input_ids",)
    CHAT = ("messages",)
    COMPLETION = ("prompt", "completion")
    TEXT = ("text",)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that every sample of this kind needs."""
        columns: tuple[str, ...] = self.value
        return columns


@dataclass(frozen=True, slots=True)
class Row:
    """One sample as it stands in a file. `place` names file and line (or row) for messages; `remarks` are no errors. If its
    strings are too long to be kept whole, `unread` is how many bytes were left out for each byte that was read. `desirable` is
    its label, if it has one.
    """

    place: str
    values: Mapping[str, Any]
    remarks: tuple[str, ...] = ()
    unread: float = 0.0
    desirable: bool | None = None


Remark = tuple[str, str]
"""The place of a sample, and a sentence about it that is no error."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The token ids of a row, and for each whether it is a target. `beyond` estimates how many more were not made; `desirable`
    is the label of the row. `parted` is where the tokens of two texts part, if those of a pair have to agree on that.
    """

    ids: list[int]
    trained: list[bool]
    beyond: int = 0
    remarks: tuple[Remark, ...] = ()
    desirable: bool | None = None
    parted: int | None = None


@dataclass(frozen=True, slots=True)
class Unmarked:
    """A row that is left out, and the reason: the chat template refuses it, or it cannot be told what the assistant says."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One tokenised sample, a view into a `TokenSet`: `input_ids` int32 and `trained` bool, both of shape `(length,)`."""

    input_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """What the user chooses about the data.

    `paths` are files, directories, Hub data sets (`owner/name`), or entries that say more about them. A step takes
    `tokens_per_step // sequence_length` rows. `packing` puts several samples into a row, which works only if the model honours
    `position_ids`. With `contents`, for calibration, everything goes through the chat template: texts are what the user says,
    and tokens count as trained wherever anybody speaks. With `everything` each token is trained. With `preferences` two samples
    that follow one another belong together. `border` is the rule for tokens of prompt and completion.
    A chat template that asks for the time gets the beginning of `template_date` (YYYY-MM-DD; None: none asks).
    """

    paths: tuple[str | DataSource, ...]
    sequence_length: int
    tokens_per_step: int
    seed: int = 0
    packing: bool = True
    shuffle: bool = True
    contents: bool = False
    template_date: str | None = None
    preferences: Preferences | None = None
    everything: bool = False
    border: Border = Border.APART

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("data: no file, directory or data set was named; name at least one")
        if self.sequence_length < 2:
            raise ConfigError(
                f"sequence_length: {self.sequence_length} holds nothing to predict; "
                "at least 2 tokens are needed, 512 to 8192 are usual"
            )
        if self.tokens_per_step < self.sequence_length:
            raise ConfigError(
                f"tokens_per_step: {self.tokens_per_step} is less than one row of sequence_length {self.sequence_length}; "
                f"set it to a multiple of {self.sequence_length}"
            )
        if self.rows_per_step % self.samples_together:
            raise ConfigError(
                f"tokens_per_step: {self.tokens_per_step} is {self.rows_per_step} rows of {self.sequence_length} tokens, and "
                "pairs take an even number; give a multiple of twice the sequence_length"
            )
        if self.preferences is Preferences.LABELS and self.rows_per_step < 4:
            raise ConfigError(
                f"tokens_per_step: {self.tokens_per_step} is one completion, and kto compares several; give at least "
                f"{4 * self.sequence_length}, as each takes two rows of sequence_length {self.sequence_length}"
            )
        if self.samples_together > 1 and self.weights:
            raise ConfigError("weight and loss: each pair occurs once in an epoch; leave weight out")
        if self.seed < 0:
            raise ConfigError(f"seed: expected an integer >= 0, found {self.seed}")

    @property
    def weights(self) -> tuple[float, ...]:
        """How often the samples of each path occur in an epoch; () if all do once."""
        found = tuple(source_of(path).weight for path in self.paths)
        return () if all(weight == 1 for weight in found) else found

    @property
    def samples_together(self) -> int:
        """How many samples that follow one another are never apart."""
        return self.preferences.value.together if self.preferences else 1

    @property
    def rows_per_step(self) -> int:
        """Rows that one optimizer step takes."""
        return self.tokens_per_step // self.sequence_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of one optimizer step, all arrays of shape `(sequences, length)`.

    Packed rows have `position_ids` that restart at each sample, and a `token_mask`: 1 for tokens, 0 for padding, on the right.
    They have no `attention_mask`, which would hide from models that samples are separate. Padded rows (one sample each) have an
    `attention_mask` (1 for tokens, 0 for padding, on the right) and no `position_ids`. `samples` (rows,) are the places of
    padded rows in their token set, `desirable` (rows,) their labels, if they have some.
    """

    input_ids: Ids
    labels: Ids
    position_ids: Ids | None = None
    attention_mask: Ids | None = None
    token_mask: Ids | None = None
    samples: Ids | None = None
    desirable: NDArray[np.bool_] | None = None

    @property
    def num_tokens(self) -> int:
        """The tokens of all rows, without padding."""
        mask = self.attention_mask if self.token_mask is None else self.token_mask
        return 0 if mask is None else int(mask.sum())

    @property
    def num_trained_tokens(self) -> int:
        """The labels that are not `IGNORED`: the divisor of a token-weighted loss."""
        return int(np.count_nonzero(self.labels != IGNORED))
