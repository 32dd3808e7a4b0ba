"""Doubles and contracts for tests, ours and those of anyone who extends Headrace: files in memory, faulty files, slow files."""

from headrace.testing.far_site import FarSite
from headrace.testing.faulty_file import Fault, FaultKind, FaultyFile
from headrace.testing.grouped_codec import GroupedCodec
from headrace.testing.memory_file import MemoryFile
from headrace.testing.power_supply import FragileFile, PowerGone, PowerSupply
from headrace.testing.row_wire import RowWire
from headrace.testing.throttled_file import ThrottledFile

__all__ = [
    "FarSite",
    "Fault",
    "FaultKind",
    "FaultyFile",
    "FragileFile",
    "GroupedCodec",
    "MemoryFile",
    "PowerGone",
    "PowerSupply",
    "RowWire",
    "ThrottledFile",
]
