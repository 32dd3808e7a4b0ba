"""Bytes to and from files: direct, striped, many in flight."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
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
        on_drives_of,
        stripe_shares,
    )
    from headrace.files.extents import Extent, ExtentReader, Reader
    from headrace.files.patience import Patience
    from headrace.files.space import Beside, default_ssd_bytes
    from headrace.files.threads import PieceTicket, ThreadEngine
    from headrace.files.volume import Volume, striping_weights

__getattr__ = lazy_face(__name__)
