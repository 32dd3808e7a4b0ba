"""A job of prompts, which may be given up on its way, and its answers."""

from pathlib import Path
from typing import Any

from headrace.generate.passes.whose_weights import open_generator
from headrace.generate.uses.jobs import JobProgress, run_job
from headrace.terms.options.generate_options import GenerateOptions


def answered(model: Path, folder: Path, most: int | None = None, *, prompts: int = 3, **more: Any) -> bytes:
    """Run a job of so many prompts, a row at a time, which is given up after `most` micro-batches; return its answers."""
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(f'{{"prompt": "water {number}"}}\n' for number in range(prompts)))
    files = {"input": folder / "in.jsonl", "output": folder / "out.jsonl"}
    options = GenerateOptions.of({**files, "rows": 1, "seats": 1, "raw": True, "host_memory": "4GiB", **more})
    seen: list[JobProgress] = []

    def progress(found: JobProgress) -> None:
        seen.append(found)
        if len(seen) == most:
            raise KeyboardInterrupt

    with open_generator(model, options, None) as generator:
        assert run_job(generator, options, sink=lambda event: None, tell_plan=lambda plan: None, progress=progress) == 0
    return (folder / "out.jsonl").read_bytes()
