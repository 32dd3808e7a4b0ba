"""Losses of a whole step: of the log-probabilities of all tokens of all its rows, called once.

`loss.py` is the contract; a file beside it is one loss, found by `table.py` under the name of its class.
"""

from headrace.losses.loss import Loss, Outcome, Preference, TokenLoss, outcome_of
from headrace.losses.table import LOSSES, loss_of

__all__ = ["LOSSES", "Loss", "Outcome", "Preference", "TokenLoss", "loss_of", "outcome_of"]
