"""Where a completion begins in tokens, if a token crosses the border of two texts: prompt and completion.

Invariant: a run keeps the rule that it began with. Runs of versions that had no choice kept the prompt's own tokens.
"""

from enum import Enum

from headrace.terms.options.named import parse_named

JOINT, APART = "joint", "apart"


class Border(Enum):
    """What becomes of such a token: TRL 1.16's rule, that of its trainers of CPO, or the prompt keeps the tokens that it has
    alone.
    """

    JOINT = "joint"
    CPO = "joint, as CPO"
    APART = "apart"


def usual_border(loss: str | None) -> str:
    """Return the choice of a new run: TRL's for the losses whose numbers are TRL's."""
    return APART if loss is None else JOINT


def border_of(chosen: str | None, loss: str | None) -> Border:
    """Return the rule of a run that has `chosen`; None: it began before there was a choice.

    Raises:
        ConfigError: `loss` is not NAME or NAME:KEY=VALUE,KEY=VALUE.
    """
    if chosen in (None, APART):
        return Border.APART
    return Border.CPO if loss is not None and parse_named("loss", loss)[0] in ("orpo", "simpo") else Border.JOINT
