"""Doubles and contracts for tests, ours and those of anyone who extends Headrace: files in memory, faulty files, slow files."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.testing.far_site import FarSite as FarSite
    from headrace.testing.faulty_file import Fault as Fault
    from headrace.testing.faulty_file import FaultKind as FaultKind
    from headrace.testing.faulty_file import FaultyFile as FaultyFile
    from headrace.testing.grouped_codec import GroupedCodec as GroupedCodec
    from headrace.testing.memory_file import MemoryFile as MemoryFile
    from headrace.testing.power_supply import FragileFile as FragileFile
    from headrace.testing.power_supply import PowerGone as PowerGone
    from headrace.testing.power_supply import PowerSupply as PowerSupply
    from headrace.testing.row_wire import RowWire as RowWire
    from headrace.testing.throttled_file import ThrottledFile as ThrottledFile

__getattr__ = lazy_face(__name__)
