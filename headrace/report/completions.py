"""`completions.jsonl`: what a run's model wrote, a line for each completion of steps in which a reward function logged columns.

Invariant: each step occurs once, in order, also after crashes: a resumed run first drops the lines of steps that were not
committed, and a half-written last line.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COMPLETIONS_NAME = "completions.jsonl"


class CompletionsFile:
    """Appends lines to `path`; there is no file before the first one. Lines after step `committed_steps` are removed."""

    def __init__(self, path: Path, *, committed_steps: int = 0) -> None:
        self._path = path
        if path.exists():
            os.truncate(path, _bytes_up_to(path, committed_steps))

    def add(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write a line for each value of the columns, which are equally long, and make them durable. A value that JSON has not
        is written as its text.
        """
        with self._path.open("a", encoding="utf-8") as file:
            for values in zip(*columns.values(), strict=True):
                row = {"step": step, **dict(zip(columns, values, strict=True))}
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _bytes_up_to(path: Path, step: int) -> int:
    """Return how many bytes the whole lines of the first `step` steps have."""
    found = 0
    with path.open("rb") as file:
        for line in file:
            try:
                kept = line.endswith(b"\n") and json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                kept = False
            if not kept:
                return found
            found += len(line)
    return found
