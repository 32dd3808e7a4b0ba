"""Words to calls: the command `headrace`."""

from headrace.cli.entry import main as main
