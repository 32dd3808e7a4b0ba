"""Doubles of files that lie in memory, fail and slow down, for our tests and for those of who extends Headrace."""

from headrace.testing.faulty_file import Fault, FaultKind, FaultyFile
from headrace.testing.memory_file import MemoryFile
from headrace.testing.throttled_file import ThrottledFile

__all__ = ["Fault", "FaultKind", "FaultyFile", "MemoryFile", "ThrottledFile"]
