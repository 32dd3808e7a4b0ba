"""The command's first step: what it does before any other module of the package is imported.

Invariant: nothing that takes time is imported here, so that Ctrl-C is reported in one line from the start.
"""

import gc
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line `arguments` (default: this process's) and exit."""
    try:
        gc.disable()  # declarations are many objects and no garbage: looking for some would take a seventh of `--help`
        try:
            from headrace.cli.app import main as run  # late: Ctrl-C during this import is reported as at any other time
        finally:
            gc.enable()
        run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        raise SystemExit(130) from None
