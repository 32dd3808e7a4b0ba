"""What the C library does with freed tensors, seen from outside: faults of fresh pages, and what stays resident."""

import ctypes
import json
import subprocess
import sys

import pytest

# Eight tensors of 4 MiB, made and freed over and over; of two sizes, so that the heap's pieces must be joined to be used.
WORK = """
import json, resource, sys
import torch
from headrace.machine import keep_freed_memory, process_status_bytes
torch.set_num_threads(1)

def work():
    alive = [torch.ones((4 + i % 2) << 20, dtype=torch.uint8) for i in range(8)]
    del alive

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

found = {}
before = process_status_bytes("RssAnon")
for keep in (False, True, False):
    told = keep_freed_memory(keep)
    for _ in range(3):
        work()
    start = faults()
    for _ in range(5):
        work()
    kept = process_status_bytes("RssAnon") - before
    found.setdefault(str(keep), []).append({"told": told, "faults": faults() - start, "kept": kept})
keep_freed_memory(False)
found["after"] = process_status_bytes("RssAnon") - before
print(json.dumps(found))
"""


GUARDED = """
import json
import torch
from headrace.machine import HeapGuard, process_status_bytes
torch.set_num_threads(1)
MIB = 1 << 20
before = process_status_bytes("RssAnon")

def resident():
    return process_status_bytes("RssAnon") - before

def work(mebibytes):
    pinned = []
    for _ in range(mebibytes):
        alive = torch.ones(MIB, dtype=torch.uint8)
        pinned.append(torch.ones(1 << 10, dtype=torch.uint8))  # so that what is freed is no end of the heap
        del alive
    big = [torch.ones(MIB, dtype=torch.uint8) for _ in range(mebibytes)]

guard = HeapGuard(before + 60 * MIB, 20 * MIB, keep=False)
found = {}
guard.after_step(before + 25 * MIB)
found["high peak"] = guard.keeps
guard.after_step(before + 23 * MIB)
found["low peak"] = guard.keeps
work(8)
guard.after_operation()
found["below"] = resident()
work(30)
found["left"] = resident()
guard.after_operation()
found["above"] = resident()
guard.after_step(0)
found["limit"] = guard.limit_bytes - before
guard.after_step(0)
found["highest"] = guard.limit_bytes - before
guard.after_step(before + 70 * MIB)
found["lowered"] = guard.limit_bytes - before
print(json.dumps(found))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_kept_below_a_limit_that_follows_the_peaks() -> None:
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    mib = 1 << 20
    assert (found["high peak"], found["low peak"]) == (False, True)
    assert 7 * mib < found["below"] < 20 * mib
    assert found["left"] > 27 * mib
    assert found["above"] < 4 * mib
    # From 60 - 2 x 20, by what the operation that ended highest lay below 60 - 16; never above 60 - 20.
    assert found["limit"] == min(40 * mib, 20 * mib + 44 * mib - found["left"])
    assert found["highest"] == 40 * mib
    assert found["lowered"] == 40 * mib - 26 * mib


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_tensors_are_kept_or_returned_as_told() -> None:
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    returned, kept = found["False"][0], found["True"][0]
    assert returned["told"]
    assert kept["told"]
    assert returned["kept"] < 4 << 20
    assert 30 << 20 < kept["kept"] < 2 * (36 << 20)
    assert kept["faults"] < returned["faults"] / 10
    # What was kept goes back when that is asked for again.
    assert found["after"] < 4 << 20
