"""Compressing without loss: every matrix goes into another code as it is, so there is no data and nothing to calibrate.

Files are those of `coded_files`, one for each block and one for the rest. One matrix is in memory at a time. So are the codes
of a small file; those of a large one wait on the disk until all sizes are known. Invariant: a killed run ends with the bytes of
an undisturbed one.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from headrace.codec.table import code_to_write
from headrace.codec.targets import DirectTarget
from headrace.compress.coded_files import CodedFiles, Spool, Written
from headrace.compress.work import MODEL, appear, ends_of, identity_of, left_lines, unfinished, working
from headrace.model import Chain, Checkpoint
from headrace.model.stored.coded_source import read_tensor
from headrace.model.stored.safetensors_file import StoredTensor
from headrace.model.written.export import export_bytes
from headrace.store.work import Work
from headrace.terms.errors import ConfigError, ModelError
from headrace.terms.options.compress_options import CompressOptions
from headrace.terms.provenance import COMPRESSION_NOTE_NAME
from headrace.terms.sizes import MIB, format_bytes, format_seconds

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# Options that say nothing here; of others it does not matter.
_OF_ROUNDING = (
    "data",
    "experts_only",
    "most_loss",
    "group_size",
    "sequence_length",
    "template_date",
    "calibration_rows",
    "held_out_rows",
    "seed",
)
_SPOOL = "codes"
# Codes of so many bytes stay in memory until their file is written.
MOST_BYTES_IN_MEMORY = 256 * MIB
_NO_SMALLER = "no smaller in it"


@dataclass(frozen=True, kw_only=True)
class Recoded:
    """A finished compression without loss: bytes of the files, and of the coded tensors before and after; `left` by reason."""

    output: Path
    tensors: int
    weights: int
    coded_bytes: int
    left: Mapping[str, str]
    bytes_before: int
    bytes_after: int


def recode(options: CompressOptions, *, say: Callable[[str], None] = lambda text: None) -> Recoded:
    """Write `options.model` to `options.output` in a lossless code, or resume. `say` gets lines for people.

    Raises:
        InputError: model or an option cannot be used; nothing is left.
        StorageError: a disk is full, or fails; the same command goes on once the cause is removed.
    """
    target = _target_of(options)
    output, checkpoint, chain = ends_of(options)
    work = unfinished(output)
    codes = max(sum(spec.num_elements for spec in layout.parameters) for layout in chain.layouts)  # of one file
    with working(work, export_bytes(checkpoint) + 2 * codes):
        run = _Recoding(target, Work.open(work, identity_of(options, checkpoint)), checkpoint, chain, say)
        run.write_units()
        result = run.finish(options.to, output)
        appear(work, output)
    return result


def _target_of(options: CompressOptions) -> DirectTarget:
    code = code_to_write("to", options.to)
    if code.direct is None:
        raise ConfigError(f"to: {options.to} rounds weights: `headrace.compress.run.compress_model` writes it")
    defaults = {field.name: field.default for field in fields(options)}
    for name in _OF_ROUNDING:
        if getattr(options, name) != defaults[name]:
            raise ConfigError(f"{name}: {options.to} changes no weight, so it has no use for that; leave it out")
    return code.direct()


class _Recoding:
    """One process's part of the work."""

    def __init__(
        self, target: DirectTarget, work: Work, checkpoint: Checkpoint, chain: Chain, say: Callable[[str], None]
    ) -> None:
        self._target, self._work, self._say = target, work, say
        self._weights = chain.attach(checkpoint)
        self._unused = list(chain.unused_tensors)
        self._files = CodedFiles(work.folder / MODEL, self._weights, chain)
        self._num_units = chain.num_blocks + 1
        self._units = list(work.done())

    def write_units(self) -> None:
        """Write the files that are not written yet."""
        if self._units:
            self._say(f"going on after file {len(self._units)} of {self._num_units}")
        self._work.begin()
        began, before = time.perf_counter(), len(self._units)
        for unit in range(before, self._num_units):
            with Spool(self._work.folder / _SPOOL) as spool:
                parts, entry = self._recoded(unit, spool)
                self._units.append({"digest": self._files.write(unit, parts), **entry})
            self._work.add(self._units[-1])
            now = time.perf_counter()
            rest = (now - began) / (unit + 1 - before) * (self._num_units - unit - 1)
            self._say(
                f"file {unit + 1} of {self._num_units}, {format_seconds(rest)} left: {entry['tensors']} matrices"
                f"{_bits_of(entry['coded_bytes'], entry['weights'])}"
            )

    def finish(self, code: str, output: Path) -> Recoded:
        """Write what makes the files a model directory, and return the result."""
        left = {name: reason for unit in self._units for name, reason in unit["left"].items()}
        tensors, weights, coded_bytes = (
            sum(unit[name] for unit in self._units) for name in ("tensors", "weights", "coded_bytes")
        )
        if not tensors:
            reasons = "; ".join(sorted(set(left.values()))) or "there are none"
            raise ModelError(
                f"{self._weights.checkpoint.directory}: none of its matrices can be coded as {code} ({reasons}); nothing was "
                "written"
            )
        names = [self._files.name(unit) for unit in range(self._num_units)]
        result = Recoded(
            output=output,
            tensors=tensors,
            weights=weights,
            coded_bytes=coded_bytes,
            left=left,
            bytes_before=self._weights.checkpoint.num_bytes,
            bytes_after=sum((self._work.folder / MODEL / name).stat().st_size for name in names),
        )
        note = {
            "code": code,
            "digests": dict(zip(names, (unit["digest"] for unit in self._units), strict=True)),
            "bytes_before": result.bytes_before,
            "bytes_after": result.bytes_after,
            "left": left,
            "unused_tensors": self._unused,
        }
        config = self._target.describe([name.removesuffix(".weight") for name in left])
        self._files.finish({"quantization_config": config}, {COMPRESSION_NOTE_NAME: json.dumps(note, indent=1) + "\n"})
        return result

    def _recoded(self, unit: int, spool: Spool) -> tuple[dict[str, Mapping[str, Written]], dict[str, Any]]:
        """Return the coded tensors of a unit by stored name, and what the record says of them."""
        parts: dict[str, Mapping[str, Written]] = {}
        left: dict[str, str] = {}
        weights = coded_bytes = 0
        for key in self._files.keys(unit):
            stored = self._weights.checkpoint.tensors[key]
            reason = self._why_left(stored)
            if not reason:
                made = self._target.parts(read_tensor(stored))
                num_bytes = sum(part.nbytes for part in made.values())
                reason = "" if num_bytes < stored.num_bytes else _NO_SMALLER
            if not reason:
                in_memory = coded_bytes + num_bytes <= MOST_BYTES_IN_MEMORY
                parts[key] = made if in_memory else {name: spool.put(name, part) for name, part in made.items()}
                weights, coded_bytes = weights + stored.num_bytes // 2, coded_bytes + num_bytes
            elif len(stored.shape) > 1:
                left[key] = reason
        return parts, {"tensors": len(parts), "weights": weights, "coded_bytes": coded_bytes, "left": left}

    def _why_left(self, stored: StoredTensor) -> str:
        dtype = _DTYPES.get(stored.dtype)
        if dtype is not torch.bfloat16:
            return f"stored as {stored.dtype}"
        return "" if self._target.takes(stored.shape, dtype) else f"of the shape {stored.shape}"


def _bits_of(coded_bytes: int, weights: int) -> str:
    return f", {8 * coded_bytes / weights:.3f} bits a weight" if weights else ""


def recoded_table(result: Recoded) -> str:
    """Return the table at the end: sizes, ratio, and what was left."""
    lines = [
        f"wrote {result.output}",
        f"  size   {format_bytes(result.bytes_before)} -> {format_bytes(result.bytes_after)}  "
        f"({result.bytes_before / result.bytes_after:.2f}x)",
        f"  coded  {result.tensors} matrices{_bits_of(result.coded_bytes, result.weights)}; every bit comes back",
    ]
    return "\n".join([*lines, *left_lines(result.left)])
