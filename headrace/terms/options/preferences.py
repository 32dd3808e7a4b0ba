"""What a loss of the whole step reads: rows that come two and two, and the columns that they are made of."""

from enum import Enum

from headrace.terms.options.named import parse_named

PAIR = ("chosen", "rejected")


class Preferences(Enum):
    """The columns of preferences, and what two rows that follow one another are."""

    PAIRS = PAIR  # a chosen completion, then the rejected one
    LABELS = ("prompt", "completion", "label")  # a completion, then the one of another prompt

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that every sample needs."""
        columns: tuple[str, ...] = self.value
        return columns


_READ_LABELS = ("kto",)
_TAKE_REWARDS = ("grpo",)


def takes_rewards(loss: str | None) -> bool:
    """Return whether the model writes the rows that the loss takes: its data are prompts.

    Raises:
        ConfigError: `loss` is not NAME or NAME:KEY=VALUE,KEY=VALUE.
    """
    return loss is not None and parse_named("loss", loss)[0] in _TAKE_REWARDS


def preferences_of(loss: str | None) -> Preferences | None:
    """Return what the loss reads that the option `loss` names; None: texts, each token by itself.

    Raises:
        ConfigError: `loss` is not NAME or NAME:KEY=VALUE,KEY=VALUE.
    """
    if loss is None or takes_rewards(loss):
        return None
    return Preferences.LABELS if parse_named("loss", loss)[0] in _READ_LABELS else Preferences.PAIRS
