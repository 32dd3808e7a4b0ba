"""Text on stdout: plain in pipes and files, with numbers and places in colour on a terminal; and notes on stderr.

Invariant: the characters are the same in both cases; a terminal only adds colour.
"""

import sys

from rich.console import Console

from headrace.terms.events import Event, Notice


def show(text: str) -> None:
    """Print `text`, whose columns are already aligned."""
    console = Console(file=sys.stdout, soft_wrap=True)
    if console.is_terminal:
        console.print(text, markup=False, emoji=False)
    else:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def tell(text: str) -> None:
    """Print `text` to stderr."""
    print(text, file=sys.stderr, flush=True)


def say(event: Event) -> None:
    """Print a notice to stderr; other events are ignored."""
    if isinstance(event, Notice):
        tell(event.text)
