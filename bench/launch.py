"""Runs one worker in its own process, watches its memory and its disk from outside, and leaves nothing behind.

Invariants: scratch directories are removed whatever happens; a run that would pass the disk limit is refused beforehand, and
stopped if it gets there all the same; a worker that fails gives a record that says how, never an exception.
"""

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker import refuse

from headrace.process import SPIN_COUNT

HERE = Path(__file__).resolve().parent
GB = 10**9
GIB = 2**30
DISK_LIMIT_BYTES = 40 * GB
SAMPLE_SECONDS = 0.02
DISK_SAMPLE_SECONDS = 2.0


@contextlib.contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """Make a directory for one benchmark inside `parent` and remove it at the end, also on SIGTERM and Ctrl-C."""
    if not parent.is_dir():
        refuse(f"--scratch {parent}: there is no such directory")
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    directory = Path(tempfile.mkdtemp(prefix="headrace-bench-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        signal.signal(signal.SIGTERM, previous)


def require_disk(directory: Path, needed_bytes: int, what: str) -> None:
    """Leave with exit code 2 if `needed_bytes` are above the benchmark's limit or above nine tenths of the free space."""
    free = shutil.disk_usage(directory).free
    if needed_bytes > min(DISK_LIMIT_BYTES, 0.9 * free):
        refuse(
            f"{what} needs about {needed_bytes / GB:.1f} GB in {directory}; "
            f"{free / GB:.1f} GB are free there and the benchmarks stay below {DISK_LIMIT_BYTES / GB:.0f} GB"
        )


def used_bytes(directory: Path) -> int:
    """Return the bytes that the files below `directory` take on the disk."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # files come and go while we look
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total


def environment(*, omp_wait_policy: str, python: Path | None = None) -> dict[str, str]:
    """Return the environment of a worker: this one, the repository importable, waiting OpenMP threads as told.

    libgomp's default is to spin for some milliseconds between parallel regions. Where another thread of the process wants the
    core (all systems that overlap something), this can cost an order of magnitude; without any spinning, small operations are
    a fifth slower. It is one setting for all contestants: passive, with as short a spin as Headrace's command line sets.
    """
    variables = dict(os.environ) | {
        "OMP_WAIT_POLICY": omp_wait_policy,
        "HF_HUB_OFFLINE": "1",
        "THP_MEM_ALLOC_ENABLE": "1",  # torch's large tensors on huge pages, as Headrace's command line has them
        "TOKENIZERS_PARALLELISM": "false",
    }
    if omp_wait_policy == "passive":
        variables["GOMP_SPINCOUNT"] = SPIN_COUNT
    if python is None:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    else:  # tools of that environment, such as ninja for DeepSpeed's extensions; PYTHONPATH would bring in this one's packages
        variables.setdefault("DS_ACCELERATOR", "cpu")
        variables["PATH"] = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
        variables.pop("PYTHONPATH", None)
    return variables


@dataclass
class Watched:
    """Memory samples of a process, `(clock seconds, RssAnon + RssShmem bytes)`, and the most disk it used.

    Children are left out: all contestants work in one process, and a child between fork and exec would count every page twice.
    """

    samples: list[tuple[float, int]] = field(default_factory=list)
    disk_peak_bytes: int = 0
    stopped_because: str | None = None

    def peak_bytes(self, start: float = 0.0, stop: float = float("inf")) -> int:
        """Return the largest sample between two clock readings."""
        return max((size for clock, size in self.samples if start <= clock <= stop), default=0)


def anonymous_bytes(pid: int) -> int:
    """Return what a process has of memory that is no file's; 0 once it has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return 0


def watch(process: subprocess.Popen, scratch: Path, timeout_seconds: float) -> Watched:
    """Sample `process` until it ends; kill its process group if it passes the disk limit or the time."""
    watched = Watched()
    deadline = time.monotonic() + timeout_seconds
    next_disk = 0.0
    try:
        while process.poll() is None:
            clock = time.monotonic()
            watched.samples.append((clock, anonymous_bytes(process.pid)))
            if clock >= next_disk:
                next_disk = clock + DISK_SAMPLE_SECONDS
                watched.disk_peak_bytes = max(watched.disk_peak_bytes, used_bytes(scratch))
            if watched.disk_peak_bytes > DISK_LIMIT_BYTES:
                watched.stopped_because = f"it used {watched.disk_peak_bytes / GB:.1f} GB of disk"
            elif clock > deadline:
                watched.stopped_because = f"it ran longer than {timeout_seconds:.0f} s"
            if watched.stopped_because:
                break
            time.sleep(SAMPLE_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: what it started ends with it
        process.wait()
    return watched


def run_worker(
    command: list[str], variables: dict[str, str], *, scratch: Path, timeout_seconds: float = 3600
) -> dict[str, Any]:
    """Run a worker with an empty directory of its own below `scratch`; return its record with what was seen from outside."""
    own = Path(tempfile.mkdtemp(prefix="run-", dir=scratch))
    result, log = own / "result.json", own / "log.txt"
    work = own / "work"
    work.mkdir()
    started = time.monotonic()
    try:
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [*command, "--scratch", str(work), "--result", str(result)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
            watched = watch(process, work, timeout_seconds)
        if process.returncode == 0 and result.exists():
            return {"status": "ok", **_seen(json.loads(result.read_text(encoding="utf-8")), watched, started)}
        return {
            "status": _ending(process.returncode, watched),
            "log": log.read_text(errors="replace", encoding="utf-8")[-3000:],
        }
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _seen(record: dict[str, Any], watched: Watched, started: float) -> dict[str, Any]:
    first = record["rows"][0]["start_clock"]
    outside = {
        "start_up_seconds": first - started,
        "peak_anonymous_bytes": watched.peak_bytes(),
        "peak_anonymous_bytes_loading": watched.peak_bytes(stop=first),
        "peak_anonymous_bytes_stepping": watched.peak_bytes(start=first),
        "peak_anonymous_bytes_training": watched.peak_bytes(stop=record["rows"][-1]["stop_clock"]),
        "disk_peak_bytes": watched.disk_peak_bytes,
    }
    return record | outside


def _ending(code: int, watched: Watched) -> str:
    if watched.stopped_because:
        return f"stopped: {watched.stopped_because}"
    if code == -signal.SIGKILL:
        return f"killed by the kernel, probably out of memory at {watched.peak_bytes() / GIB:.2f} GiB"
    return f"failed with exit code {code}"


def make_model(size: str, directory: Path, variables: dict[str, str]) -> None:
    """Write the checkpoint of `size` into `directory`, in a process of its own so that this one stays small."""
    print(f"writing the checkpoint of size {size} ...", flush=True)
    command = [sys.executable, str(HERE / "make_model.py"), "--size", size, str(directory)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        refuse(f"make_model.py failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")


def measure_machine(directory: Path, profile: Path, seconds: float) -> dict[str, Any]:
    """Return what `headrace bench machine` finds now, with the disk of `directory`, and leave it in `profile`."""
    print(f"measuring the machine for {seconds:.0f} s ...", flush=True)
    command = [sys.executable, "-m", "headrace", "bench", "machine", "--ssd", str(directory)]
    command += ["--output", str(profile), "--seconds", str(seconds)]
    done = subprocess.run(command, env=environment(omp_wait_policy="passive"), capture_output=True, text=True, check=False)
    if done.returncode:
        refuse(f"the machine could not be measured:\n{done.stderr[-2000:]}")
    print(done.stdout)
    return dict(json.loads(profile.read_text(encoding="utf-8")))


def machine_facts(directory: Path) -> dict[str, Any]:
    """Return what a reader needs to place the numbers: processor, cores, memory, kernel, file system of `directory`."""
    processors = [
        line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if line.startswith("model name")
    ]
    total = next(line for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines() if line.startswith("MemTotal"))
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    inside = [mount for mount in mounts if directory.resolve().is_relative_to(mount[1])]
    return {
        "processor": processors[0].split(":")[1].strip() if processors else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(total.split()[1]) * 1024,
        "kernel": platform.release(),
        "file_system": max(inside, key=lambda mount: len(mount[1]))[2] if inside else "?",
        "python": platform.python_version(),
        "load_average_before": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
