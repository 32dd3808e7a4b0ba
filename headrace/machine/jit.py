"""Functions compiled by numba at their first call: the loops of update and checksum.

Invariant: where no directory for machine code can be written (a read-only installation without a home directory), functions are
compiled in each process anew; importing them never fails.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

_Loop = TypeVar("_Loop", bound=Callable[..., Any])

# For loops and for what they inline. numba's own error model would test every divisor for zero, and not vectorise.
JIT_OPTIONS = {"nogil": True, "error_model": "numpy"}


def compiled(loop: _Loop) -> _Loop:
    """Compile `loop` at its first call, to run without the GIL; keep the machine code on disk where that is possible.

    Numba notices a change only of the file that a loop stands in: what it calls must stand there too.
    """
    try:
        machine_code: _Loop = njit(cache=True, **JIT_OPTIONS)(loop)
    except RuntimeError:  # no directory to write to
        machine_code = njit(**JIT_OPTIONS)(loop)
    return machine_code
