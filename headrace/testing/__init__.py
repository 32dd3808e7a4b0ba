"""Doubles that fail and slow down, for our tests and for those of who extends Headrace."""

from headrace.testing.faulty_file import Fault, FaultKind, FaultyFile
from headrace.testing.throttled_file import ThrottledFile

__all__ = ["Fault", "FaultKind", "FaultyFile", "ThrottledFile"]
