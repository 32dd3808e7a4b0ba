"""Where the seconds before the first token go, beside the time to read the model's files once past the page cache.

    python bench/first_token.py MODEL [--rounds 3]

Each round is a process of its own, with as many threads as cores: import, open (trials of the architecture), plan, the rest of
`prepare` (buffers, resident weights), and the pass over a prompt of 16 tokens, which reads all blocks. Then the files are read
whole, by the same threads, into memory that was touched before. Printed are medians: seconds by the clock and of processors.
Prepare and pass together are to take at most 1.1 of the reading.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

PROMPT, NEW = tuple(range(10, 26)), 32
BLOCK = 4096


def measured(work: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """Return what `work` returns, and its seconds by the clock and of processors."""
    clock, used = time.perf_counter(), time.process_time()
    found = work()
    return found, (time.perf_counter() - clock, time.process_time() - used)


def reading(model: Path) -> Callable[[], None]:
    """Return what reads the model's files once."""
    import numpy as np

    from headrace.files import ExtentReader
    from headrace.files.extents import Extent
    from headrace.machine.host_memory import huge_page_buffer

    files = {path: path.stat().st_size // BLOCK * BLOCK for path in sorted(model.glob("*.safetensors"))}
    into, extents = huge_page_buffer(sum(files.values())), list[Extent]()
    into[:: 1 << 12] = np.uint8(1)
    for path, size in files.items():
        extents.append(Extent(path, 0, size, sum(extent.num_bytes for extent in extents)))

    def read() -> None:
        with ExtentReader(files, sink=lambda event: None) as reader:
            reader.read(extents, into).wait()

    return read


def run(model: Path) -> dict[str, tuple[float, float]]:
    """Measure one process, from its imports on."""

    def imports() -> None:
        from headrace.process import heavy_imports, set_process_defaults

        set_process_defaults()
        with heavy_imports():
            import headrace.generate.uses.answering

            assert headrace.generate.uses.answering

    phases: dict[str, tuple[float, float]] = {}
    _, phases["import"] = measured(imports)
    from headrace.generate.passes.generator import Generator
    from headrace.terms.events import GenerationPass

    passes: list[tuple[float, float]] = []  # each pass's seconds, and those of processors until its end

    def note(event: Any) -> None:
        if isinstance(event, GenerationPass):
            passes.append((event.seconds, time.process_time()))

    generator, phases["open"] = measured(lambda: Generator.open(model, sink=note, compute_dtype="bfloat16", rows=1, seats=1))
    with generator:
        plan, phases["plan"] = measured(lambda: generator.plan_only(1, len(PROMPT), NEW))
        _, phases["buffers and residents"] = measured(lambda: generator.use(plan))
        answers = generator.generate([PROMPT], max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        used = time.process_time()
        list(answers)
        phases["first pass"] = (passes[0][0], passes[0][1] - used)
        phases["a later pass"] = (median(seconds for seconds, _ in passes[1:]), (passes[-1][1] - passes[0][1]) / (NEW - 1))
    _, phases["files read once"] = measured(reading(model))
    return phases


def main() -> None:
    """Print a table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.work:
        print(json.dumps(run(given.model)))
        return
    runs: list[dict[str, tuple[float, float]]] = []
    for _ in range(given.rounds):
        done = subprocess.run([sys.executable, __file__, str(given.model), "--work"], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"a round ended with exit code {done.returncode}: {done.stderr[-2000:]}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    for phase in runs[0]:
        clock, used = (median(each[phase][number] for each in runs) for number in (0, 1))
        print(f"{phase:24} {clock:7.2f} s by the clock, {used:6.2f} s of processors")
    ours = ("plan", "buffers and residents", "first pass")
    ratios = [sum(each[phase][0] for phase in ours) / each["files read once"][0] for each in runs]
    print(f"{'prepare and first pass':24} {median(ratios):7.2f} of the reading")


if __name__ == "__main__":
    main()
