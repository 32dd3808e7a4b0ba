"""Peers: who is there, in which generation, and the lanes between them. Only this package imports torch.distributed."""

from headrace.net.address import Address
from headrace.net.generation import Generation
from headrace.net.lane import PIECE_BYTES, Lane
from headrace.net.listener import Listener
from headrace.net.member import Member

__all__ = ["PIECE_BYTES", "Address", "Generation", "Lane", "Listener", "Member"]
