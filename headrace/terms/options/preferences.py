"""What each loss of the whole step reads: the columns of its data, declared once, and how many samples belong together."""

from dataclasses import dataclass
from enum import Enum

from headrace.terms.options.named import parse_named

PAIR = ("chosen", "rejected")


@dataclass(frozen=True, slots=True)
class Taken:
    """What a loss takes: each row has `columns`, and may have `beside`; `truths` among them are true or false, others texts or
    messages. Where a program of the user's gets `every` other column, too, one that a row lacks is None there. `together`
    samples follow one another. `expected` says it to people.
    """

    columns: tuple[str, ...]
    expected: str
    beside: tuple[str, ...] = ()
    truths: tuple[str, ...] = ()
    every: bool = False
    together: int = 2


class Preferences(Enum):
    """The kinds of such data."""

    # A chosen completion, then the rejected one.
    PAIRS = Taken(PAIR, "preferences are read with the columns chosen + rejected, and prompt if there is one", ("prompt",))
    # A completion, then the one of another prompt.
    LABELS = Taken(
        ("prompt", "completion", "label"),
        "labelled data have prompt + completion + label, or chosen + rejected",
        truths=("label",),
    )
    # The model writes the rows. Messages that end with one of the assistant are an answer that it goes on with.
    PROMPTS = Taken(("prompt",), "prompts are read with the column prompt: a text, or messages", every=True, together=1)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that every sample needs."""
        return self.value.columns


READ_FOR_LOSSES = frozenset(name for each in Preferences for name in (*each.columns, *each.value.beside))
"""All columns that some loss reads."""

_OF_LOSS = {"kto": Preferences.LABELS, "grpo": Preferences.PROMPTS}


def takes_rewards(loss: str | None) -> bool:
    """Return whether the model writes the rows that the loss takes: its data are prompts.

    Raises:
        ConfigError: `loss` is not NAME or NAME:KEY=VALUE,KEY=VALUE.
    """
    return preferences_of(loss) is Preferences.PROMPTS


def preferences_of(loss: str | None) -> Preferences | None:
    """Return what the loss reads that the option `loss` names; None: texts, each token by itself.

    Raises:
        ConfigError: `loss` is not NAME or NAME:KEY=VALUE,KEY=VALUE.
    """
    return None if loss is None else _OF_LOSS.get(parse_named("loss", loss)[0], Preferences.PAIRS)
