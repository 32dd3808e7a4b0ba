"""Functions compiled by numba at their first call: the loops of update and checksum.

Invariant: where no directory for machine code can be written (a read-only installation without a home directory), functions are
compiled in each process anew; importing them never fails.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def compiled(loop: _Loop) -> _Loop:
    """Compile `loop` at its first call, to run without the GIL; keep the machine code on disk where that is possible.

    Numba notices a change only of the file that a loop stands in: what it calls must stand there too.
    """
    options = {"nogil": True, "error_model": "numpy"}  # "python" would test every divisor for zero, and not vectorise
    try:
        machine_code: _Loop = njit(cache=True, **options)(loop)
    except RuntimeError:  # no directory to write to
        machine_code = njit(**options)(loop)
    return machine_code
