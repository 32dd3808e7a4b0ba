"""The command `headrace`: words become calls."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.cli.entry import main as main

__getattr__ = lazy_face(__name__)
