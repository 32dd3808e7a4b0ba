"""Write a trained model as an ordinary Hugging Face directory, in the layout and dtypes it came in.

Units are requested one at a time and streamed tensor by tensor: memory is one unit and a few dozen megabytes. What was not
trained (buffers, tensors that the architecture does not use, tokenizer, configuration) is copied. Invariant: the directory
appears whole or not at all.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from headrace.files.durable import appearing, is_mount_point
from headrace.files.model_directory import ADAPTER_CONFIG
from headrace.model.chain.chain import Chain
from headrace.model.directory.checkpoint import Checkpoint
from headrace.model.directory.importing import at_least_1d, parameter_view, rows_per_piece
from headrace.model.directory.matching import Conversion, Piece, WeightMap, reverse_conversion
from headrace.model.stored.encoding import take
from headrace.model.stored.safetensors_file import StoredTensor, read_bytes
from headrace.model.stored.shard_writer import ShardWriter, plan_shards, shard_file_bytes
from headrace.terms.errors import ExportFailed, HeadraceError, ModelError, RunDirectoryError, has_no_space
from headrace.terms.layout import UnitLayout
from headrace.terms.provenance import COMPRESSION_NOTE_NAME
from headrace.terms.sizes import format_bytes

UnitPlanes = tuple[np.ndarray, np.ndarray | None]
ReadUnit = Callable[[int], UnitPlanes | None]
ReadRows = Callable[[], Iterator[UnitPlanes]]

# What is copied from a model directory: everything that is no weight in any framework's format.
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".py")
_COPIED_NAMES = ("LICENSE", "LICENSE.md", "NOTICE", "USE_POLICY.md", "additional_chat_templates")
_SHARD_BYTES = 5 * 10**9


def export_bytes(checkpoint: Checkpoint, shard_bytes: int = _SHARD_BYTES) -> int:
    """Return the bytes that an export of the model from `checkpoint` has, without index and notes."""
    shards = plan_shards(list(checkpoint.tensors.values()), shard_bytes)
    copied = [
        each for path in files_beside_weights(checkpoint.directory) for each in (path, *path.rglob("*")) if each.is_file()
    ]
    return sum(map(shard_file_bytes, shards)) + sum(path.stat().st_size for path in copied)


class Exporter:
    """Exports a chain whose weights came from `checkpoint` to `out_dir`, which must not exist or be empty.

    `read_unit(unit)` returns the flat weight plane of a unit, and the plane that completes its master (or None). It returns
    None for a unit whose tensors stay exactly as they came. The arrays are used until the next call. A shard holds about
    `shard_bytes` (decimal gigabytes are usual). `notes` are the texts of further files, by file name. Stored tensors of `rows`
    are made of their own planes, some rows at a time.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        chain: Chain,
        out_dir: str | Path,
        read_unit: ReadUnit,
        *,
        shard_bytes: int = _SHARD_BYTES,
        notes: Mapping[str, str] = MappingProxyType({}),
        rows: Mapping[str, ReadRows] = MappingProxyType({}),
    ) -> None:
        self._weights, self._rows = chain.attach(checkpoint), rows
        self._chain = chain
        self._out = Path(out_dir)
        self._read_unit = read_unit
        self._shard_bytes = shard_bytes
        self._notes = notes

    def write(self) -> Path:
        """Write the directory and return its path.

        Raises:
            RunDirectoryError: `out_dir` exists and is not empty.
            ExportFailed: it is a mount point, there is not enough space beside it, a file cannot be written, or one to copy
                cannot be read.
            ModelError: a weight cannot be stored in the dtype it came in.
        """
        with appearing_model(self._out, export_bytes(self._weights.checkpoint, self._shard_bytes)) as partial:
            self._write_weights(partial)
            copy_files(self._weights.checkpoint.directory, partial)
            if self._weights.checkpoint.is_coded:
                _forget_codes(partial)
            for name, text in self._notes.items():
                (partial / name).write_text(text, encoding="utf-8")
        return self._out

    def _write_weights(self, directory: Path) -> None:
        weights, layouts = self._weights, self._chain.layouts
        keys = [[stored for _, stored in stored_keys(weights, layout)] for layout in layouts]
        copied = [*weights.buffers.values(), *weights.unused]
        order = [key for unit in keys for key in unit] + copied
        tensors = [weights.checkpoint.tensors[key] for key in order]
        writer = ShardWriter(directory, plan_shards(tensors, self._shard_bytes))
        try:
            for unit, layout in enumerate(layouts):
                planes = self._read_unit(unit) if any(key not in self._rows for key in keys[unit]) else None
                made: dict[str, np.ndarray] = {}
                for source, key in stored_keys(weights, layout):
                    stored = weights.checkpoint.tensors[key]
                    if key in self._rows:
                        writer.write(key, (take(*some, stored.dtype) for some in self._rows[key]()))
                    elif planes is None:
                        writer.write(key, read_bytes(stored))
                    elif isinstance(source, Piece):
                        writer.write(key, _encode(layout, source, stored, planes))
                    else:
                        made = made if key in made else _convert_back(weights, source, layout, planes)
                        writer.write(key, [made.pop(key)])
            for key in copied:
                writer.write(key, read_bytes(weights.checkpoint.tensors[key]))
            writer.finish()
        finally:
            writer.close()


@contextmanager
def appearing_model(out: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a directory in which to write a model of so many bytes; afterwards it appears as `out`, whole or not at all.

    Raises:
        RunDirectoryError: `out` exists and is not empty.
        ExportFailed: it is a mount point, there is not enough space beside it, or a file cannot be read or written.
    """
    place = Path(os.path.realpath(out))
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise RunDirectoryError(f"export to {out}: it exists and is not empty; choose another directory")
    if is_mount_point(place):
        raise ExportFailed(
            f"export to {out}: it is a mount point, where a finished model cannot appear in one step; choose a directory "
            "inside it"
        )
    try:
        with appearing(place) as partial:
            if shutil.disk_usage(partial).free < needed_bytes:
                raise _disk_full(out, needed_bytes)
            yield partial
    except OSError as error:
        raise error if isinstance(error, HeadraceError) else _refusal(out, needed_bytes, error) from error


def _disk_full(out: Path, needed_bytes: int) -> ExportFailed:
    free_bytes = shutil.disk_usage(Path(os.path.realpath(out)).parent).free
    return ExportFailed(
        f"export to {out}: needs {needed_bytes} bytes ({format_bytes(needed_bytes)}), "
        f"free are {free_bytes} ({format_bytes(free_bytes)}); free some space or choose another directory"
    )


def _refusal(out: Path, needed_bytes: int, error: OSError) -> ExportFailed:
    # An error of `copytree` has no number, only the words of the errors that it met.
    if has_no_space(error) or os.strerror(errno.ENOSPC) in str(error):
        return _disk_full(out, needed_bytes)
    return ExportFailed(f"export to {out}: {error.filename or out}: {error.strerror or error}")


def _forget_codes(directory: Path) -> None:
    """Remove from the files of a directory what they say about coded weights."""
    (directory / COMPRESSION_NOTE_NAME).unlink(missing_ok=True)
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def stored_keys(weights: WeightMap, layout: UnitLayout) -> Iterator[tuple[Piece | Conversion, str]]:
    """Yield the origin and the name of each stored tensor of a unit, in the order in which they are written."""
    names = {spec.name for spec in layout.parameters}
    for spec in layout.parameters:
        for piece in (*weights.pieces.get(spec.name, ()), *weights.copies.get(spec.name, ())):
            yield piece, piece.key
    for conversion in weights.conversions:
        if conversion.parameters[0] in names:
            for keys in conversion.sources.values():
                for key in keys:
                    yield conversion, key


def exact_units(chain: Chain, weights: WeightMap) -> frozenset[int]:
    """Return the units whose files need the whole master, because weights as compute reads them lack bits of it."""
    if chain.compute_dtype != "bfloat16":
        return frozenset(range(len(chain.layouts)))
    tensors = weights.checkpoint.tensors
    return frozenset(
        unit
        for unit, layout in enumerate(chain.layouts)
        if any(tensors[key].dtype != "BF16" for _, key in stored_keys(weights, layout))
    )


def _encode(layout: UnitLayout, piece: Piece, stored: StoredTensor, planes: UnitPlanes) -> Iterator[np.ndarray]:
    """Yield a stored tensor's bits, some rows at a time."""
    spec = next(spec for spec in layout.parameters if spec.name == piece.parameter)
    weight = at_least_1d(parameter_view(planes[0], spec)[piece.index])
    master = None if planes[1] is None else at_least_1d(parameter_view(planes[1], spec)[piece.index])
    step = rows_per_piece(weight.shape)
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        try:
            yield take(weight[rows], None if master is None else master[rows], stored.dtype)
        except ModelError as error:
            raise ModelError(f"export: {piece.key}: {error}") from error


def _convert_back(weights: WeightMap, conversion: Conversion, layout: UnitLayout, planes: UnitPlanes) -> dict[str, np.ndarray]:
    """Run transformers' operations backwards on whole parameters, in float32; return the bits by stored name."""
    specs = {spec.name: spec for spec in layout.parameters}
    tensors = {}
    for made_name, name in zip(conversion.made, conversion.parameters, strict=True):
        weight = parameter_view(planes[0], specs[name])
        master = None if planes[1] is None else parameter_view(planes[1], specs[name])
        dtype = "F32" if any(_dtype(weights, key) != "BF16" for key in conversion.renamed.values()) else "BF16"
        bits = np.ascontiguousarray(take(weight, master, dtype))
        tensors[made_name] = torch.from_numpy(bits.view(np.int16) if dtype == "BF16" else bits)
    made = {}
    for key, tensor in reverse_conversion(conversion, weights.stored_model, tensors).items():
        bits = tensor.contiguous().numpy()
        made[key] = bits if bits.dtype == np.int16 else take(bits, None, _dtype(weights, key))
    return made


def _dtype(weights: WeightMap, key: str) -> str:
    return weights.checkpoint.tensors[key].dtype


def files_beside_weights(source: Path) -> list[Path]:
    """Return the files for configuration, tokenizer, chat template and licence; no weights, no index."""
    return [
        path
        for path in sorted(source.iterdir())
        if (path.name in _COPIED_NAMES or path.suffix in _COPIED_SUFFIXES)
        and not path.name.endswith(".index.json")
        and path.name != ADAPTER_CONFIG  # loaders would look for its weights
    ]


def copy_files(source: Path, target: Path, *, without: Collection[str] = ()) -> None:
    """Copy the files beside the weights of a model directory, overwriting; files named in `without` are left out."""
    for path in files_beside_weights(source):
        if path.name in without:
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, target / path.name)
