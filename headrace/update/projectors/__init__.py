"""Projectors into a subspace of gradients: one file for each way to choose one (`projector` says what one is)."""

from headrace.update.projectors.projector import IDENTITY, Kind, Pair, Projector, relative_error
from headrace.update.projectors.table import PROJECTORS

__all__ = ["IDENTITY", "PROJECTORS", "Kind", "Pair", "Projector", "relative_error"]
