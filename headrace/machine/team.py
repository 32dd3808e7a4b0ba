"""Loops in the very team of threads that torch uses: these still spin from its last operator, others would wait for them."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numba import types
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def take_team(context: Any, words: Any, place: Any, count: Any) -> Any:
    """Add `count` to the 64-bit number at `place` of `words`, as several threads do at once; return what it was."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), args[2], "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64, types.int64), lower


def run_in_team(loop: Any, words: Any, most: int) -> None:
    """Run a callback of C (`machine/jit.py`) with `words` in up to `most` of torch's threads, which share the work."""
    team, threads = torch_team(), min(torch.get_num_threads(), most)
    if threads == 1 or team is None:
        loop.ctypes(words)
    else:
        team(loop.address, words, threads, 0)


@cache
def torch_team() -> Any:
    """Return the function by which OpenMP runs a callback in the team of threads of torch; None if it has none that is known.

    It is that of GNU's OpenMP, which LLVM's and Intel's have, too: `GOMP_parallel(callback, argument, threads, 0)`.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "omp" in line.rpartition("/")[2]}
    own = [path for path in loaded if Path(path).parent == Path(torch.__file__).parent / "lib"]
    for path in [*own, *sorted(loaded)]:
        try:
            found = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return found
    return None
