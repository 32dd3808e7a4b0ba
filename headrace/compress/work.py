"""Unfinished work of a compression: a directory beside the result, its record, and when it may be resumed.

Unfinished work lies in `OUT.unfinished`. A record names what is finished; the same command continues behind it. Invariant: OUT
appears complete or not at all, and work is resumed only by what would write the same bytes.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.files.durable import write_whole
from headrace.model import Checkpoint
from headrace.store.lock import RunLock
from headrace.store.model_here import whole_model_at
from headrace.terms.errors import ConfigError, DiskFull, ModelError, RunDirectoryError
from headrace.terms.json_text import parse_json
from headrace.terms.options.compress_options import CompressOptions
from headrace.terms.sizes import format_bytes

RECORD, MODEL = "record.json", "model"
_UNFINISHED = ".unfinished"
# Changes with the bytes that a compression writes, so that no version resumes what an older one began.
_FORM = 3
# Options that may change when the same command goes on.
_FREE = {"output", "cache", "most_loss", "host_memory"}


def result_place_of(output: Path) -> Path:
    """Return where the result will be.

    Raises:
        RunDirectoryError: something is there.
    """
    place = Path(os.path.realpath(output))
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise RunDirectoryError(f"{output}: exists already; name a new directory; nothing was written")
    return place


def unfinished(output: Path) -> Path:
    """Return where unfinished work for `output` lies."""
    return output.with_name(output.name + _UNFINISHED)


@contextmanager
def held(work: Path, needed_bytes: int) -> Iterator[None]:
    """Hold the directory of unfinished work, which is made if there is space for `needed_bytes`. It is removed at the end,
    and where model, data or options turn out to be of no use.

    Raises:
        DiskFull: there is not enough space.
        RunDirectoryError: another process holds it.
    """
    if not work.exists():
        _check_space(work, needed_bytes)
    work.mkdir(parents=True, exist_ok=True)
    lock = RunLock(work)
    done = False
    try:
        yield
        done = True
    except (ConfigError, ModelError):
        done = True  # the model or the data cannot be used, now or later
        raise
    finally:
        lock.release()
        if done:
            shutil.rmtree(work, ignore_errors=True)


def appear(work: Path, output: Path) -> None:
    """Have the finished model in `work` appear as `output`, which may be an empty directory."""
    if output.exists():
        output.rmdir()  # it is empty
    (work / MODEL).replace(output)


@dataclass(frozen=True)
class WorkRecord:
    """What is finished in `folder`: `values`, which `commit` writes."""

    folder: Path
    values: dict[str, Any]

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any]) -> "WorkRecord":
        """Return the record in `folder`, a new one if there is none. `identity` fixes the bytes of the result.

        Raises:
            RunDirectoryError: the work was begun otherwise, or by another version; or its record is damaged.
        """
        path = folder / RECORD
        if not path.exists():
            return cls(folder, {"identity": dict(identity)})
        try:
            record: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
            begun = record["identity"]
            if not isinstance(begun, dict):
                raise ValueError(f"expected an object, found {type(begun).__name__}")
        except (ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(f"{path}: is damaged ({error!r}); remove {folder} and begin again") from error
        if begun.get("form") != _FORM:
            raise RunDirectoryError(
                f"{folder}: was begun by another version, which writes other bytes: go on with that version, or remove the "
                "directory to begin anew"
            )
        for name, value in identity.items():
            if begun.get(name) != value:
                raise RunDirectoryError(
                    f"{folder}: was begun with {name} {begun.get(name)}, asked for is {value}; give the same again to "
                    "resume, or remove the directory to start again"
                )
        return cls(folder, record)

    def commit(self) -> None:
        """Write it, whole or not at all."""
        write_whole(self.folder / RECORD, json.dumps(self.values) + "\n")


def identity_of(options: CompressOptions, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what fixes the bytes of a result, but for the data."""
    fixed = {key: value for key, value in options.to_json().items() if key not in _FREE | {"model", "data"}}
    return {"form": _FORM, "model": _digest_of_model(checkpoint), **fixed}


def refuse_coded(model: Path) -> None:
    """Refuse a model that is already coded.

    Raises:
        ModelError: it is coded, or the directory has no readable configuration.
    """
    whole_model_at(model)
    try:
        config = parse_json((model / "config.json").read_text(encoding="utf-8"))
    except ValueError:
        return  # the next reader reports the error
    found = config.get("quantization_config") if isinstance(config, dict) else None
    if found is not None:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise ModelError(
            f"{model}: is coded already ({method}), and rounding twice would lose more. Give the model in 16 or 32 bits, or "
            "make one with `headrace decompress`"
        )


def _digest_of_model(checkpoint: Checkpoint) -> str:
    """Return a digest of the names, places and times of the weights, which changes if they change between two commands."""
    paths = {tensor.path for tensor in checkpoint.tensors.values()}
    times = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
    return hashlib.blake2b(repr(times).encode(), digest_size=16).hexdigest()


def _check_space(work: Path, needed_bytes: int) -> None:
    there = next(path for path in work.parents if path.exists())
    free = shutil.disk_usage(there).free
    if needed_bytes > free:
        raise DiskFull(
            f"{work}: compressing needs up to {format_bytes(needed_bytes)} there, free are {format_bytes(free)}; free some "
            "space, or name another directory"
        )


def listed(names: Sequence[Any]) -> str:
    """Return the first names in words, and how many more there are."""
    return f"{', '.join(map(str, names[:6]))}{f' and {len(names) - 6} more' if len(names) > 6 else ''}"


def left_lines(left: Mapping[str, str]) -> list[str]:
    """Return a line for each reason for which weights stay as they are; `left` has the reasons by name."""
    return [
        f"  left as they are ({reason}): {listed([name for name, other in left.items() if other == reason])}"
        for reason in dict.fromkeys(left.values())
    ]
