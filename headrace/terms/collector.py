"""Python's collector of cycles, while many objects are made that are in none.

Programs of a search are such: they go when nobody has them any longer. The collector would look at every object of the process
again and again, those of torch and transformers among them.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Let nothing collect cycles while entered, in any thread. Also a decorator."""
    if not gc.isenabled():
        yield  # who disabled it enables it
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
