"""Words to calls: the command `headrace`."""

from headrace.cli.app import main

__all__ = ["main"]
