"""Projectors into a subspace of gradients: one file for each way to choose one (`projector` says what one is)."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.update.projectors.projector import IDENTITY, Pair, Projector, ProjectorKind, relative_error
    from headrace.update.projectors.table import PROJECTORS

__getattr__ = lazy_face(__name__)
