"""Bytes to and from files: direct, striped, many in flight."""

from headrace.files.block_file import BLOCK_BYTES, BlockFile, Bytes, DoneTicket, Ticket
from headrace.files.direct import DirectFile
from headrace.files.directory_facts import (
    Bandwidth,
    DirectoryFacts,
    describe_directory,
    drive_name,
    file_systems,
    measure_directory,
    measured_reading,
    measured_stripes,
    measured_weights,
    on_drives_of,
)
from headrace.files.extents import Extent, ExtentReader, Reader
from headrace.files.space import Beside, default_ssd_bytes
from headrace.files.threads import PieceTicket, ThreadEngine
from headrace.files.volume import Volume, striping_weights

__all__ = [
    "BLOCK_BYTES",
    "Bandwidth",
    "Beside",
    "BlockFile",
    "Bytes",
    "DirectFile",
    "DirectoryFacts",
    "DoneTicket",
    "Extent",
    "ExtentReader",
    "PieceTicket",
    "Reader",
    "ThreadEngine",
    "Ticket",
    "Volume",
    "default_ssd_bytes",
    "describe_directory",
    "drive_name",
    "file_systems",
    "measure_directory",
    "measured_reading",
    "measured_stripes",
    "measured_weights",
    "on_drives_of",
    "striping_weights",
]
