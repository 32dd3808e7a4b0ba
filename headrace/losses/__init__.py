"""Losses of a whole step: of the log-probabilities of all tokens of all its rows, called once.

`loss.py` is the contract; a file beside it is one loss, found by `table.py` under the name of its class.
"""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.losses.loss import Loss as Loss
    from headrace.losses.loss import Outcome as Outcome
    from headrace.losses.loss import Preference as Preference
    from headrace.losses.loss import TokenLoss as TokenLoss
    from headrace.losses.loss import outcome_of as outcome_of
    from headrace.losses.table import LOSSES as LOSSES
    from headrace.losses.table import loss_of as loss_of

__getattr__ = lazy_face(__name__)
