"""Bytes to and from files: direct, striped, many in flight."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.files.block_file import BLOCK_BYTES as BLOCK_BYTES
    from headrace.files.block_file import BlockFile as BlockFile
    from headrace.files.block_file import Bytes as Bytes
    from headrace.files.block_file import DoneTicket as DoneTicket
    from headrace.files.block_file import Ticket as Ticket
    from headrace.files.direct import DirectFile as DirectFile
    from headrace.files.directory_facts import Bandwidth as Bandwidth
    from headrace.files.directory_facts import DirectoryFacts as DirectoryFacts
    from headrace.files.directory_facts import describe_directory as describe_directory
    from headrace.files.directory_facts import drive_name as drive_name
    from headrace.files.directory_facts import file_systems as file_systems
    from headrace.files.directory_facts import measure_directory as measure_directory
    from headrace.files.directory_facts import measured_reading as measured_reading
    from headrace.files.directory_facts import measured_stripes as measured_stripes
    from headrace.files.directory_facts import on_drives_of as on_drives_of
    from headrace.files.directory_facts import stripe_shares as stripe_shares
    from headrace.files.extents import Extent as Extent
    from headrace.files.extents import ExtentReader as ExtentReader
    from headrace.files.extents import Reader as Reader
    from headrace.files.patience import Patience as Patience
    from headrace.files.space import Beside as Beside
    from headrace.files.space import default_ssd_bytes as default_ssd_bytes
    from headrace.files.threads import PieceTicket as PieceTicket
    from headrace.files.threads import ThreadEngine as ThreadEngine
    from headrace.files.volume import Volume as Volume
    from headrace.files.volume import striping_weights as striping_weights

__getattr__ = lazy_face(__name__)
