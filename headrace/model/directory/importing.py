"""Fill a unit's flat buffers from a checkpoint.

Every parameter is read row by row in bounded pieces and converted on the way. So importing needs the unit's buffers and a few
dozen megabytes, whatever the model. Invariant: the planes hold the stored values exactly, or `ModelError` names the tensor.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.files.model_directory import is_whole_model
from headrace.model.directory.checkpoint import Checkpoint
from headrace.model.directory.matching import Conversion, Piece, WeightMap, read_whole, run_conversion
from headrace.model.stored.encoding import float32_of, put
from headrace.model.stored.safetensors_file import PIECE_BYTES, WEIGHT_DTYPES, read_header, read_tensor_rows
from headrace.terms.errors import ModelError
from headrace.terms.layout import ParameterSpec, UnitLayout

_STORED_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_ROWS_AT_A_TIME_ELEMENTS = 1 << 20
# Bytes for each element of a piece that is being put into the planes: as read, its float32 values, and the temporaries of
# `encoding.put`. They are counted line by line for the plane set that takes most.
_CONVERTING_BYTES = {"BF16": 12, "F16": 18, "F32": 16}


def import_unit(weights: WeightMap, layout: UnitLayout, weight_out: np.ndarray, master_out: np.ndarray | None) -> bool:
    """Fill the planes of one unit: `weight_out` and, if the plane set has one, the plane that completes the master.

    Both are 1-D with the layout's number of elements: uint16 `hi` and int16 `lo` (bfloat16 compute), float32 and None, or
    float16 and float32 master. Padding becomes 0. Returns whether the weight plane alone is the master: `master_out` is None or
    all zero.

    Raises:
        ModelError: a stored value is NaN, infinite or out of range.
    """
    for plane in (weight_out, master_out):
        if plane is not None and plane.shape != (layout.num_elements,):
            raise ModelError(f"{layout.name}: expected planes of {layout.num_elements} elements, found shape {plane.shape}")
        if plane is not None:
            _clear_padding(layout, plane)
    specs = {spec.name: spec for spec in layout.parameters}
    for spec in layout.parameters:
        for piece in weights.pieces.get(spec.name, ()):
            _import_piece(weights, spec, piece, weight_out, master_out)
    for conversion in weights.conversions:
        if any(name in specs for name in conversion.parameters):
            _import_conversion(weights, conversion, specs, weight_out, master_out)
    return master_out is None or not master_out.any()


def import_workspace_bytes(layouts: Sequence[UnitLayout], weights: WeightMap | None = None) -> int:
    """Return an upper bound of the bytes that `import_unit` takes besides the planes: a piece of a tensor while it is
    converted.

    Without `weights` the bound is for a checkpoint in BF16 with one tensor for each parameter.
    """
    if weights is None:
        stored = [("BF16", parameter.shape) for layout in layouts for parameter in layout.parameters]
        return max((_piece_bytes(dtype, shape) for dtype, shape in stored), default=0)
    tensors = weights.checkpoint.tensors
    pieces = [tensors[piece.key] for found in (*weights.pieces.values(), *weights.copies.values()) for piece in found]
    # Two pieces where a tied parameter is stored twice and compared.
    factor = 2 if any(weights.copies.values()) else 1
    bounds = [factor * _piece_bytes(tensor.dtype, tensor.shape) for tensor in pieces]
    own = {spec.name for layout in layouts for spec in layout.parameters}
    for conversion in weights.conversions:
        if own.isdisjoint(conversion.parameters):
            continue  # a table that stays in its files
        sources = [tensors[key] for keys in conversion.sources.values() for key in keys]
        # A conversion holds all sources and all results at once; then each result is put into the planes whole.
        elements = sum(math.prod(tensor.shape) for tensor in sources)
        bounds.append(2 * sum(tensor.num_bytes for tensor in sources) + max(_CONVERTING_BYTES.values()) * elements)
    return max(bounds, default=0)


def _piece_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a piece of a stored tensor while it is converted: `read_tensor_rows` reads at least one row."""
    elements, row = math.prod(shape), math.prod(shape[1:])
    return min(elements, max(row, PIECE_BYTES // WEIGHT_DTYPES[dtype].itemsize)) * _CONVERTING_BYTES[dtype]


def parameter_view(plane: np.ndarray, spec: ParameterSpec) -> np.ndarray:
    """Return the view of a flat plane that is the parameter, in its shape."""
    return plane[spec.offset : spec.offset + spec.num_elements].reshape(spec.shape)


def at_least_1d(view: np.ndarray) -> np.ndarray:
    """Return a view whose first dimension can be sliced: scalars get one."""
    return view.reshape(1) if view.ndim == 0 else view


def rows_per_piece(shape: tuple[int, ...]) -> int:
    """Return how many rows of a tensor are converted at a time, so that temporaries stay small."""
    return max(1, _ROWS_AT_A_TIME_ELEMENTS // max(1, math.prod(shape[1:])))


def refuse_not_finite(directory: Path) -> None:
    """Read all weights of a directory, coded or not, of a model or an adapter.

    Raises:
        ModelError: one is NaN or infinite; the message names its tensor.
    """
    adapters = directory / "adapter_model.safetensors"
    found = dict(read_header(adapters)) if adapters.exists() else {}
    if not found or is_whole_model(directory):
        found |= Checkpoint.open(directory, decode=True).tensors
    for key, stored in found.items():
        for start, stop, rows in read_tensor_rows(stored) if stored.dtype in WEIGHT_DTYPES else ():
            wrong = int((~np.isfinite(float32_of(rows, stored.dtype))).sum())
            if wrong:
                raise ModelError(f"{stored.path}: {key}: NaN or infinity in {wrong} values of rows {start} to {stop}")


def _clear_padding(layout: UnitLayout, plane: np.ndarray) -> None:
    end = 0
    for spec in layout.parameters:
        plane[end : spec.offset] = 0
        end = spec.offset + spec.num_elements
    plane[end:] = 0


def _import_piece(
    weights: WeightMap, spec: ParameterSpec, piece: Piece, weight_out: np.ndarray, master_out: np.ndarray | None
) -> None:
    stored = weights.checkpoint.tensors[piece.key]
    weight = at_least_1d(parameter_view(weight_out, spec)[piece.index])
    master = None if master_out is None else at_least_1d(parameter_view(master_out, spec)[piece.index])
    for start, stop, rows in read_tensor_rows(stored):
        try:
            put(rows, stored.dtype, weight[start:stop], None if master is None else master[start:stop])
        except ModelError as error:
            raise ModelError(f"{stored.path}: {piece.key}: {error} in rows {start} to {stop}") from error


def check_copies(weights: WeightMap) -> None:
    """Refuse a tied parameter that is stored twice with different values: transformers would not tie it.

    Raises:
        ModelError: there is one.
    """
    for name, copies in weights.copies.items():
        for copy in copies:
            _check_copy(weights, copy, weights.pieces[name][0])


def _check_copy(weights: WeightMap, copy: Piece, first: Piece) -> None:
    stored, other = (weights.checkpoint.tensors[piece.key] for piece in (copy, first))
    same = stored.dtype == other.dtype and all(
        np.array_equal(float32_of(one, stored.dtype), float32_of(two, stored.dtype))
        for (_, _, one), (_, _, two) in zip(read_tensor_rows(stored), read_tensor_rows(other), strict=True)
    )
    if not same:
        raise ModelError(
            f"{stored.path}: {copy.key} and {first.key} differ, but the configuration ties them; "
            "set tie_word_embeddings to false in config.json to train them apart"
        )


def _import_conversion(
    weights: WeightMap,
    conversion: Conversion,
    specs: dict[str, ParameterSpec],
    weight_out: np.ndarray,
    master_out: np.ndarray | None,
) -> None:
    made: dict[str, Any] = run_conversion(
        conversion, weights.stored_model, lambda key: read_whole(weights.checkpoint.tensors[key])
    )
    for name, tensor in zip(conversion.parameters, made.values(), strict=True):
        if name not in specs:
            raise ModelError(f"{conversion.target}: its stored tensors make {name} too, which lies in another unit")
        dtype = _STORED_NAMES[tensor.dtype]
        values = (tensor.contiguous().view(torch.int16) if dtype == "BF16" else tensor).numpy()
        values = values.view(np.uint16) if dtype == "BF16" else values
        master = None if master_out is None else parameter_view(master_out, specs[name])
        try:
            put(values, dtype, parameter_view(weight_out, specs[name]), master)
        except ModelError as error:
            raise ModelError(f"{name}, made from {', '.join(conversion.sources)}: {error}") from error
