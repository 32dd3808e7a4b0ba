"""The only place that reads or sets the process environment and the interpreter's own settings.

Invariant: a user's own setting is never overruled. Call it before torch is imported, because OpenMP reads its settings once.
"""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.machine.control_groups import quota_cores
from headrace.terms.collector import without_collection
from headrace.terms.launch import Launch

# By default idle OpenMP threads spin for milliseconds on cores that the update and the SSD threads could use. Without any
# spinning, each of a block's many small operations waits for a thread to be woken (docs/decisions/0003).
SPIN_COUNT = "10000"
_DEFAULTS = {
    # Large tensors lie on huge pages: freed ones go back to the kernel at once (machine/host_memory.py), and so fresh pages
    # cost less.
    "THP_MEM_ALLOC_ENABLE": "1",
    "TOKENIZERS_PARALLELISM": "true",
    "TRANSFORMERS_VERBOSITY": "error",
    # oneDNN keeps compiled products, one for each shape; 1024 by default. Experts get another number of tokens each time, so
    # a mixture in bfloat16 would fill that: 0.6 GiB that no plan knows (`ask.place.KEPT_PRODUCTS_BYTES`).
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    # A lost peer is reported in one line, not by the library's stack.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# A thread that comes back from the kernel waits so many seconds for a thread that runs Python to make way. A drive transfers
# several pieces in Python's own 5 ms. Beside such a thread, 1 ms gave 1.6 times the bytes per second.
_SWITCH_SECONDS = 0.001


def set_process_defaults() -> None:
    """Set those defaults of the libraries and the interpreter that the user has not set. Call it before torch is imported,
    because torch and OpenMP read their settings once.
    """
    if "OMP_WAIT_POLICY" not in os.environ:  # otherwise a spin count would overrule it
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    quota = quota_cores()
    if quota is not None and quota < len(os.sched_getaffinity(0)):
        # No more threads than may run all the time: where threads wait for one another, a stopped one holds up all.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(quota))))
    if (launch := launched()) is not None and os.environ.get("OMP_NUM_THREADS") == "1":
        # torchrun sets it to 1 for all processes, whatever the machine.
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // launch.local_size))
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    sys.setswitchinterval(min(_SWITCH_SECONDS, sys.getswitchinterval()))


@contextmanager
def heavy_imports() -> Iterator[None]:
    """While entered, a command imports torch: no garbage is looked for, and no later search looks at what was imported.

    Such searches took a fifth of the import, and then a quarter of a second each. A process that has torch has objects of its
    own, which are left alone.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    with without_collection():
        yield
    gc.collect()
    gc.freeze()
    atexit.register(_unfreeze)


def _unfreeze() -> None:
    """Let Python free what Triton has at the end: its library prints pages of what is left."""
    if "triton" in sys.modules:
        gc.unfreeze()


def launched() -> Launch | None:
    """Return where this process stands among those that torchrun started; None if it is alone."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    found = [os.environ.get(name, "") for name in names]
    if not all(each.isdecimal() for each in found) or int(found[1]) < 2 or not (address := os.environ.get("MASTER_ADDR")):
        return None
    rank, size, local_rank, local_size, port = map(int, found)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=address,
        port=port,
        hosts=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        meeting=f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{restart}",
        again=restart != "0",
    )


def cache_directory() -> Path:
    """Return the directory for tokenised data between runs: `$XDG_CACHE_HOME/headrace`, else `~/.cache/headrace`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def machine_profile_path() -> Path:
    """Return the file for what `headrace bench machine` measures: in `$XDG_CONFIG_HOME/headrace`, else `~/.config/headrace`."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "headrace" / "machine.json"
