"""Peers: who is there, in which generation, and the lanes between them. Only this package imports torch.distributed."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.net.address import Address as Address
    from headrace.net.generation import Generation as Generation
    from headrace.net.lane import PIECE_BYTES as PIECE_BYTES
    from headrace.net.lane import Channel as Channel
    from headrace.net.listener import APART as APART
    from headrace.net.listener import TOGETHER as TOGETHER
    from headrace.net.listener import Listener as Listener
    from headrace.net.member import Member as Member
    from headrace.net.ranks import Ranks as Ranks
    from headrace.net.relay import Relay as Relay
    from headrace.net.shared_copy import SharedCopy as SharedCopy

__getattr__ = lazy_face(__name__)
