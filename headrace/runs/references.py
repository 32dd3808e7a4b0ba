"""Log-probabilities of rows where training began, for losses that take them: made before the first step, kept in the cache.

A file below `cache` has a record for each row that was scored, appended batch by batch. Its name is a digest of all that
decides the numbers. Killed, it goes on after its last whole record; another run of the same model and data finds them there.
Invariant: every number is of the weights before the first step. A run that has taken a step makes none.
"""

import fcntl
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headrace.data import Batch, BatchStream
from headrace.data.batches.open_data import step_tensors_of
from headrace.runs.evaluating import Evaluations
from headrace.runs.protocols import RunningEngine
from headrace.terms.errors import RunDirectoryError
from headrace.terms.options.adapter import Lora, adapter_of
from headrace.terms.options.run_options import RunOptions

_RECORD = struct.Struct("<qdI")
_RULES = 2  # 2: sums over the columns of the loss


class References:
    """The reference's log-probabilities of the rows of `stream`, and of its held-out ones."""

    def __init__(self, config: RunOptions, stream: BatchStream) -> None:
        self._stream = stream
        # A row's number has the bits of a step's only in the very batch of that step.
        order = f"{config.seed} {config.shuffle} {config.tokens_per_step}"
        self._trained = _File.of_data(config, stream.digest, order)
        held_out = stream.held_out
        self._held_out = _File.of_data(config, held_out.info.digest, "") if held_out is not None else None

    def make(self, engine: RunningEngine, evaluations: Evaluations, heed: Callable[[], bool]) -> int:
        """Score the rows of the whole run that have no number yet, in the batches of its steps; return how many were scored.

        Raises:
            RunDirectoryError: some are missing, and the run has taken a step.
        """
        steps = min(evaluations.total_steps, -int(-self._stream.steps_per_epoch // 1) + 1)
        start = self._stream.from_the_start()
        made = self._trained.fill(engine, (start.next_batch() for _ in range(steps)), heed)
        if self._held_out is not None and evaluations.rows is not None:
            made += self._held_out.fill(engine, evaluations.rows.batches(), heed)
        return made

    def beside(self, batch: Batch, *, held_out: bool = False) -> dict[str, torch.Tensor]:
        """Return the tensors of a batch, with the numbers of its rows."""
        file = self._held_out if held_out else self._trained
        assert file is not None, "there are held-out rows only where data are held out"
        assert batch.samples is not None, "rows of pairs are not packed"
        return step_tensors_of(batch) | {"reference_log_probs": file.of(batch.samples.tolist())}


class _File:
    """The numbers in the file `path`; a run that had taken a step before may have them in the file `earlier`."""

    def __init__(self, path: Path, earlier: Path) -> None:
        self._path, self._earlier = path, earlier
        self._known, self._end = _read(path)

    @classmethod
    def of_data(cls, config: RunOptions, data: str, order: str) -> "_File":
        folder = config.cache / "references"
        names = (_digest(config, data, f"{_RULES} {order}"), _digest(config, data))
        return cls(*(folder / f"{name}.bin" for name in names))

    def of(self, samples: Iterable[int]) -> torch.Tensor:
        return torch.tensor([self._known[each] for each in samples], dtype=torch.float32)

    def fill(self, engine: RunningEngine, batches: Iterable[Batch], heed: Callable[[], bool]) -> int:
        made = 0
        if engine.step_index and self._earlier.exists() and not self._path.exists():
            self._path = self._earlier  # the run began with an earlier version, whose sums round otherwise
        with _locked(self._path):
            self._known, self._end = _read(self._path)  # what another run has made meanwhile
            for batch in batches:
                assert batch.samples is not None, "rows of pairs are not packed"
                samples = batch.samples.tolist()
                if heed() or all(each in self._known for each in samples):
                    continue
                if engine.step_index:
                    raise RunDirectoryError(
                        f"{self._path}: log-probabilities of the reference are missing, and after step {engine.step_index} the "
                        "model that they are of is gone; restore the file, or begin a new run"
                    )
                self._append(dict(zip(samples, engine.log_probs(step_tensors_of(batch)).tolist(), strict=True)))
                made += len(samples)
        return made

    def _append(self, found: dict[int, float]) -> None:
        new = {sample: value for sample, value in found.items() if sample not in self._known}
        content = b"".join(_record(*each) for each in new.items())
        with self._path.open("r+b") as file:
            file.truncate(self._end)  # half a record that a killed process left
            file.seek(self._end)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._end += len(content)
        self._known |= new


def _record(sample: int, value: float) -> bytes:
    whole = struct.pack("<qd", sample, value)
    return whole + struct.pack("<I", zlib.crc32(whole))


def _read(path: Path) -> tuple[dict[int, float], int]:
    """Return the numbers of rows in `path` up to the first damaged record, and where that begins."""
    content = path.read_bytes() if path.exists() else b""
    known: dict[int, float] = {}
    for start in range(0, len(content) - _RECORD.size + 1, _RECORD.size):
        sample, value, checksum = _RECORD.unpack_from(content, start)
        if zlib.crc32(content[start : start + 16]) != checksum:
            return known, start
        known[sample] = value
    return known, len(content) // _RECORD.size * _RECORD.size


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(config: RunOptions, data: str, *more: str) -> str:
    """Return a digest of what decides the numbers: model, samples, length, dtype, adapter, and `more`."""
    adapter = adapter_of(config.adapter) if config.adapter else None
    begun = [Path(adapter.from_)] if isinstance(adapter, Lora) and adapter.from_ else []  # the reference has it, too
    found = (path for folder in (config.model, *begun) for path in folder.glob("*"))
    files = sorted(path for path in found if path.suffix in (".json", ".safetensors", ".bin"))
    stamps = [(path.name, (status := path.stat()).st_size, status.st_mtime_ns) for path in files]
    parts: list[Any] = [config.model, stamps, data, config.compute_dtype, config.sequence_length, config.adapter, *more]
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]
