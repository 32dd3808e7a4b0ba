"""How gradients travel: one file for each way (`headrace.update.wire` says what one is)."""

from headrace.update.wires.dense import DenseWire

__all__ = ["DenseWire"]
