"""A compression's unfinished work (`store.work`): where it lies, and what decides the bytes of its result.

It lies in `OUT.unfinished`. Invariant: OUT appears complete or not at all.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.model import Chain, Checkpoint
from headrace.store.model_here import whole_model_at
from headrace.store.work import held
from headrace.terms.errors import ConfigError, DiskFull, ModelError, RunDirectoryError
from headrace.terms.json_text import parse_json
from headrace.terms.options.compress_options import CompressOptions
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.sizes import format_bytes

MODEL = "model"
_UNFINISHED = ".unfinished"
# Changes with the bytes that a compression writes, so that no version resumes what an older one began.
_FORM = 4
# Options that may change when the same command goes on.
_FREE = {"output", "cache", "most_loss", "host_memory"}


def ends_of(options: CompressOptions) -> tuple[Path, Checkpoint, Chain]:
    """Return where the result will be, and the model: as it is stored, and as units.

    Raises:
        RunDirectoryError: something is there.
        ModelError: the model cannot be read, or is coded already.
    """
    output = Path(os.path.realpath(options.output))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RunDirectoryError(f"{options.output}: exists already; name a new directory; nothing was written")
    _refuse_coded(options.model)
    checkpoint = Checkpoint.open(options.model)
    return output, checkpoint, Chain.from_config(checkpoint.config, "float32", Optimizer())


def unfinished(output: Path) -> Path:
    """Return where unfinished work for `output` lies."""
    return output.with_name(output.name + _UNFINISHED)


@contextmanager
def working(work: Path, needed_bytes: int) -> Iterator[None]:
    """Hold the directory of unfinished work, which is made if there is space for `needed_bytes`. It is removed at the end,
    and where model, data or options turn out to be of no use, now or later.

    Raises:
        DiskFull: there is not enough space.
        RunDirectoryError: another process holds it.
    """
    free = shutil.disk_usage(next(path for path in work.parents if path.exists())).free
    if needed_bytes > free and not work.exists():
        raise DiskFull(
            f"{work}: compressing needs up to {format_bytes(needed_bytes)} there, free are {format_bytes(free)}; free some "
            "space, or name another directory"
        )
    with held(work, useless=(ConfigError, ModelError), lock_needed=True):
        yield


def appear(work: Path, output: Path) -> None:
    """Have the finished model in `work` appear as `output`, which may be an empty directory."""
    if output.exists():
        output.rmdir()  # it is empty
    (work / MODEL).replace(output)


def identity_of(options: CompressOptions, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what fixes the bytes of a result, but for the data."""
    fixed = {key: value for key, value in options.to_json().items() if key not in _FREE | {"model", "data"}}
    return {"form": _FORM, "model": _digest_of_model(checkpoint), **fixed}


def _refuse_coded(model: Path) -> None:
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


def listed(names: Sequence[Any]) -> str:
    """Return the first names in words, and how many more there are."""
    return f"{', '.join(map(str, names[:6]))}{f' and {len(names) - 6} more' if len(names) > 6 else ''}"


def left_lines(left: Mapping[str, str]) -> list[str]:
    """Return a line for each reason for which weights stay as they are; `left` has the reasons by name."""
    return [
        f"  left as they are ({reason}): {listed([name for name, other in left.items() if other == reason])}"
        for reason in dict.fromkeys(left.values())
    ]
