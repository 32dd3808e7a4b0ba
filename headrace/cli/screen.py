"""Text on stdout: plain in pipes and files, with numbers and places in colour on a terminal.

Invariant: the characters are the same in both cases; a terminal only adds colour.
"""

import sys

from rich.console import Console


def show(text: str) -> None:
    """Print `text`, whose columns are already aligned."""
    console = Console(file=sys.stdout, soft_wrap=True)
    if console.is_terminal:
        console.print(text, markup=False, emoji=False)
    else:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
