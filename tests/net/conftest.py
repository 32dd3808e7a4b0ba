"""The clock of those who watch over one another."""

from net_peers import clock

__all__ = ["clock"]
