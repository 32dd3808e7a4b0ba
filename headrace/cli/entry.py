"""The command's first step: what it does before anything of it is imported.

Invariant: nothing is imported here that takes time, so that Ctrl-C is told in one line from the start.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line `arguments` (default: this process's) and exit."""
    try:
        from headrace.cli.app import main as run  # late: Ctrl-C while it is imported is told as at any other time

        run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        raise SystemExit(130) from None
