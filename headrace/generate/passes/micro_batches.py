"""The input and output of a generator: micro-batches of prompts, and their answers."""

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol


class Together(Protocol):
    """Rows that go through the model together."""

    @property
    def rows(self) -> Sized:
        """The rows."""


@dataclass(frozen=True, slots=True)
class SeatRows:
    """Rows of token ids that are generated together; `settings` are arguments of transformers' `generate`.

    `number` belongs to the caller. Random numbers begin at `seed`, as after `torch.manual_seed(seed)`.
    """

    number: int
    rows: tuple[tuple[int, ...], ...]
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.rows))


@dataclass(frozen=True, slots=True)
class Generated:
    """The result of a micro-batch: per row the new tokens, without padding; `raw` is what `generate` returned.

    `error` is what it raised instead, where errors are contained.
    """

    batch: SeatRows
    tokens: tuple[tuple[int, ...], ...]
    raw: Any
    error: Exception | None = None


def kept_copies(settings: Mapping[str, Any]) -> int:
    """Return how many caches per row stay where compute is, because rows are exchanged or tokens taken back; else 0."""
    config = settings["generation_config"]
    copies = max(config.num_beams or 1, config.num_return_sequences or 1)
    taken_back = settings.get("assistant_model") is not None or bool(config.prompt_lookup_num_tokens)
    return copies if copies > 1 or taken_back else 0
