"""How gradients travel: one file for each way (`headrace.update.wires.wire` says what one is)."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.update.wires.adapter import AdapterWire
    from headrace.update.wires.dense import DenseWire
    from headrace.update.wires.frozen import FrozenWire
    from headrace.update.wires.lsp import Lsp, LspWire
    from headrace.update.wires.table import WIRES, wire_of

__getattr__ = lazy_face(__name__)
