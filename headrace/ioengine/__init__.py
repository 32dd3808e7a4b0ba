"""Bytes to and from files: direct, striped, many in flight."""

from headrace.ioengine.base import BLOCK_BYTES, BlockFile, Bytes, DoneTicket, Ticket
from headrace.ioengine.direct import DirectFile
from headrace.ioengine.faulty import Fault, FaultKind, FaultyFile
from headrace.ioengine.measure import (
    Bandwidth,
    DirectoryFacts,
    describe_directory,
    file_systems,
    measure_directory,
    measured_weights,
)
from headrace.ioengine.memory import MemoryFile
from headrace.ioengine.space import default_ssd_bytes
from headrace.ioengine.threads import PieceTicket, ThreadEngine
from headrace.ioengine.throttled import ThrottledFile
from headrace.ioengine.volume import Volume, striping_weights

__all__ = [
    "BLOCK_BYTES",
    "Bandwidth",
    "BlockFile",
    "Bytes",
    "DirectFile",
    "DirectoryFacts",
    "DoneTicket",
    "Fault",
    "FaultKind",
    "FaultyFile",
    "MemoryFile",
    "PieceTicket",
    "ThreadEngine",
    "ThrottledFile",
    "Ticket",
    "Volume",
    "default_ssd_bytes",
    "describe_directory",
    "file_systems",
    "measure_directory",
    "measured_weights",
    "striping_weights",
]
