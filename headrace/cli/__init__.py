"""The command `headrace`: words become calls."""

from headrace.cli.entry import main as main
