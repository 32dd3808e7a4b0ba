"""The values that go into and come out of a chain."""

from dataclasses import dataclass

import torch

from headrace.model.blocks.taps import BlockCall

# Targets with this value are not trained on: the convention of torch and transformers.
IGNORED = -100


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some sequences of a step. All tensors are (b, T) int64; labels are not shifted, -100 where nothing is trained.

    `token_mask` has 0 for padding where `attention_mask` does not say it: losses that count every token leave padding out.
    Attention does not use it: in a packed row the positions keep padding apart.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    token_mask: torch.Tensor | None = None

    @property
    def counted(self) -> torch.Tensor | None:
        """1 for tokens and 0 for padding, (b, T); None: all are tokens."""
        return self.attention_mask if self.token_mask is None else self.token_mask

    def cut(self, rows: slice) -> "MicroBatch":
        """Return some of the sequences."""
        values = (self.input_ids, self.labels, self.attention_mask, self.position_ids, self.token_mask)
        return MicroBatch(*(None if value is None else value[rows] for value in values))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class PrologueResult:
    """First hidden states (b, T, hidden) and, for each block, what it is called with besides hidden states."""

    hidden: torch.Tensor
    calls: tuple[BlockCall, ...]


@dataclass(frozen=True, slots=True)
class BlockResult:
    """Hidden states (b, T, hidden) after a block, and what it hands aside: router logits (b·T, experts), where collected."""

    hidden: torch.Tensor
    asides: tuple[torch.Tensor, ...] = ()


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return targets (b, T): the label of the next position, -100 in the last column."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
