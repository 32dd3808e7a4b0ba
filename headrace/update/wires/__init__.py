"""How gradients travel: one file for each way (`headrace.update.wire` says what one is)."""

from headrace.update.wires.adapter import AdapterWire
from headrace.update.wires.dense import DenseWire
from headrace.update.wires.frozen import FrozenWire
from headrace.update.wires.lsp import Lsp, LspWire
from headrace.update.wires.table import WIRES, gradient_of, wire_of, wire_on

__all__ = ["WIRES", "AdapterWire", "DenseWire", "FrozenWire", "Lsp", "LspWire", "gradient_of", "wire_of", "wire_on"]
