"""Functions compiled by numba at their first call: the loops of update and checksum, and what they have in common.

Invariant: importing functions never fails. If no directory for machine code can be written (a read-only installation without a
home directory), each process compiles them again.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import cfunc, config, njit, types
from numba.extending import intrinsic
from numba.misc.appdirs import AppDirs

_Loop = TypeVar("_Loop", bound=Callable[..., Any])

# For loops and for what they inline. numba's own error model would test every divisor for zero, and not vectorise.
JIT_OPTIONS = {"nogil": True, "error_model": "numpy"}


def compiled(loop: _Loop, **more: Any) -> _Loop:
    """Compile `loop` at its first call, to run without the GIL; keep the machine code on disk where that is possible.

    Numba notices a change only of the file that a loop stands in: what it calls must stand there too. `more` are further
    options of numba.
    """
    options = {**JIT_OPTIONS, **more}
    try:
        machine_code: _Loop = njit(cache=True, **options)(loop)
    except RuntimeError:  # no directory to write to
        machine_code = njit(**options)(loop)
    return machine_code


def callback(loop: Callable[..., Any], *arguments: Any) -> Any:
    """Compile `loop` as C code calls it; keep the machine code on disk where that is possible.

    It takes `arguments` of types of numba's, and returns nothing. What it becomes has an `address`, and a function of
    `ctypes` that runs it without the GIL.
    """
    kind = types.void(*arguments)
    try:
        return cfunc(kind, cache=True, error_model="numpy")(loop)
    except RuntimeError:  # no directory to write to
        return cfunc(kind, error_model="numpy")(loop)


@intrinsic  # type: ignore[untyped-decorator]
def full_width(context: Any) -> Any:
    """Ask for the widest registers there are, in the function that calls this.

    LLVM keeps to half of them on several processors with AVX-512, for the sake of code that has few such loops. Measured on one
    (docs/log/update-kernel): the update gets 0.88 to 0.95 of the stream instead of 0.70 to 0.90.
    """

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        # llvmlite's own `add` takes attributes without a value only; what is in the set it writes as it stands.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return ctx.get_dummy_value()

    return types.none(), lower


def machine_code_files(package: Path) -> list[Path]:
    """Return the files with machine code of loops in `package`: beside it, or where numba keeps what it cannot write there."""
    elsewhere = [Path(base) for base in (config.CACHE_DIR, AppDirs(appname="numba", appauthor=False).user_cache_dir) if base]
    found = []
    for folder in sorted({source.parent for source in package.rglob("*.py")}):
        # As numba's cache locators name it.
        name = f"{folder.name}_{hashlib.sha1(str(folder.absolute()).encode()).hexdigest()}"
        for place in (folder / "__pycache__", *(base / name for base in elsewhere)):
            found += [path for path in place.glob("*.nb[ic]") if path.is_file()]
    return found
