"""Model directories with coded weights: which stored tensors are the parts of which weight, and how they are decoded.

For all other code such a weight is an ordinary stored tensor with the model's shape. Its rows are decoded as they are read.
Invariant: a weight has all of its parts, in the shapes of its code, or `ModelError` says what is missing.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.codec import Codec, Parts
from headrace.codec.bf16x12 import Bf16x12
from headrace.codec.dictionary import Dictionary
from headrace.codec.published import Fp8Blocks, Mxfp4, Nf4, PackQuantized
from headrace.codec.sparse import Sparse
from headrace.codec.sparse_loops import SPARE
from headrace.codec.table import CODES
from headrace.codec.targets import BF16X12, DIGEST, FORMAT, METHOD, SPARSE, TABLE, is_dictionary_table
from headrace.codec.ternary import TritsCodec, WordsCodec
from headrace.model.stored.coded_keys import KEYS, Rule, anything, refused_keys
from headrace.model.stored.safetensors_file import StoredTensor, read_bytes
from headrace.terms.coding import as_matrix
from headrace.terms.errors import ModelError

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
}
_PACK, _NF4 = "pack-quantized", ".quant_state.bitsandbytes__nf4"
_MXFP4_GROUP = 32

Tensors = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class CodedSource:
    """Where the parts of a weight lie: `stored` parts by name; `given` parts have no tensor of their own in a file."""

    codec: Codec
    shape: tuple[int, ...]
    dtype: str
    stored: Mapping[str, StoredTensor] = field(repr=False)
    given: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def parts(self) -> Parts:
        """Read all parts."""
        return {name: read_tensor(stored) for name, stored in self.stored.items()} | dict(self.given)

    def read_rows(self, piece_bytes: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Decode rows, and yield them as `safetensors_file.read_rows` does.

        Raises:
            ModelError: the parts are damaged.
        """
        parts, dtype = self.parts(), getattr(torch, TORCH_NAMES[self.dtype])
        rows, columns = as_matrix(self.shape)
        each = rows // self.shape[0]  # rows of the matrix for one entry of the first dimension
        step = max(1, min(self.shape[0], piece_bytes // max(1, each * columns * dtype.itemsize)))
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])
            into = torch.empty((stop - start) * each, columns, dtype=dtype)
            self.codec.decode(parts, into, range(start * each, stop * each))
            bits = into.view(torch.int16).numpy().view(np.uint16) if self.dtype == "BF16" else into.numpy()
            yield start, stop, bits.reshape(stop - start, *self.shape[1:])


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """Return a whole tensor of any dtype."""
    out = np.empty(stored.num_bytes, np.uint8)
    start = 0
    for piece in read_bytes(stored):
        out[start : start + piece.size] = piece
        start += piece.size
    return torch.from_numpy(out).view(getattr(torch, TORCH_NAMES[stored.dtype])).view(stored.shape)


def decoded_tensors(directory: Path, config: Any, tensors: Tensors) -> dict[str, StoredTensor]:
    """Return the stored tensors with coded weights in the place of their parts.

    `config` has a `quantization_config`.

    Raises:
        ModelError: the code is none of those that are read, or parts are missing or of another shape.
    """
    described = config.quantization_config
    described = dict(described if isinstance(described, Mapping) else described.to_dict())
    method = str(described.get("quant_method"))
    named = str(getattr(config.get_text_config(), "dtype", None) or "").removeprefix("torch.")
    dtype = "F16" if named == "float16" else "BF16"
    if method not in READERS:
        raise ModelError(f"{directory}: its weights are coded by {method}, which is not read; read are {_read()}")
    reader, rules = READERS[method]
    if refused := refused_keys(rules, described):
        raise ModelError(
            f"{directory}: quantization_config has {', '.join(refused)}, which would change results and is not supported. "
            "Use a model without it, or decode it with the program that wrote it"
        )
    try:
        found, used = reader(described, tensors, dtype)
    except _Refusal as error:
        raise ModelError(f"{directory}: its weights are coded by {method}, and {error}; read are {_read()}") from error
    for key, source in found.items():
        _check(directory, key, source)
    made = {key: _weight(key, source) for key, source in found.items()}
    return {key: tensor for key, tensor in tensors.items() if key not in used} | made


def _read() -> str:
    *most, last = dict.fromkeys(code.files for code in CODES.values())
    return f"{', '.join(most)} and {last}"


class _Refusal(Exception):
    """Why a code is not read."""


def _weight(key: str, source: CodedSource) -> StoredTensor:
    size = prod(source.shape) * 2
    first = next(iter(source.stored.values()))
    return StoredTensor(key, first.path, first.offset, size, source.dtype, source.shape, source)


def _check(directory: Path, key: str, source: CodedSource) -> None:
    """Check that the parts are those that the code has for a matrix of that shape."""
    rows, columns = as_matrix(source.shape)
    if not source.codec.takes(rows, columns):
        raise ModelError(f"{directory}: {key}: {source.codec.name} cannot hold a matrix of {rows} x {columns}")
    for part in source.codec.places(rows, columns):
        stored = source.stored.get(part.name)
        if stored is None and part.name in source.given:
            continue
        found = None if stored is None else (TORCH_NAMES.get(stored.dtype), stored.shape)
        if found != (part.dtype, part.shape):
            raise ModelError(
                f"{directory}: {key}: part {part.name} should be {part.dtype} {part.shape}, found is "
                f"{'none' if found is None else f'{found[0]} {found[1]}'}; the files are damaged, or of another format"
            )


Found = tuple[dict[str, CodedSource], set[str]]  # coded weights by their names, and the names of their parts
Reader = Callable[[Mapping[str, Any], Tensors, str], Found]


def _compressed_tensors(described: Mapping[str, Any], tensors: Tensors, dtype: str) -> Found:
    groups = (described.get("config_groups") or {}).values()
    formats = {group.get("format") or described.get("format") for group in groups}
    weights = [group.get("weights") or {} for group in groups]
    if formats != {_PACK} or any(each.get("num_bits") != 4 or each.get("type", "int") != "int" for each in weights):
        raise _Refusal(f"its format is {', '.join(sorted(map(str, formats)))}")
    found, used = {}, set()
    for key, packed in tensors.items():
        stem = key.removesuffix("weight_packed")
        if stem == key:
            continue
        names = [name for name in ("weight_packed", "weight_scale", "weight_zero_point") if f"{stem}{name}" in tensors]
        if f"{stem}weight_g_idx" in tensors:
            raise _Refusal(f"{stem}weight_g_idx gives its groups an order of their own")
        shape = tensors.get(f"{stem}weight_shape")
        rows, columns = packed.shape[0], packed.shape[1] * 8
        if shape is not None:
            rows, columns = (int(size) for size in read_tensor(shape).tolist())
        scale = tensors.get(f"{stem}weight_scale")
        if scale is None or len(scale.shape) != 2:
            raise _Refusal(f"{stem}weight_scale is missing, or no table")
        group = 0 if scale.shape[1] == 1 else columns // scale.shape[1]
        codec = PackQuantized(group, TORCH_NAMES[scale.dtype], symmetric="weight_zero_point" not in names)
        stored = {name: tensors[f"{stem}{name}"] for name in names}
        own = scale.dtype if scale.dtype in ("BF16", "F16") else dtype
        found[f"{stem}weight"] = CodedSource(codec, (rows, columns), own, stored)
        used |= {f"{stem}{name}" for name in (*names, "weight_shape")}
    return found, used


def _fp8(described: Mapping[str, Any], tensors: Tensors, dtype: str) -> Found:
    block = described.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise _Refusal(f"weight_block_size is {block}: scales are not those of blocks")
    found, used = {}, set()
    for key, scale in tensors.items():
        stem = key.removesuffix("_scale_inv")
        if stem == key or stem not in tensors:
            continue
        codec = Fp8Blocks(int(block[0]), int(block[1]), TORCH_NAMES[scale.dtype])
        stored = {"weight": tensors[stem], "weight_scale_inv": scale}
        found[stem] = CodedSource(codec, tensors[stem].shape, dtype, stored)
        used |= {stem, key}
    return found, used


def _mxfp4(described: Mapping[str, Any], tensors: Tensors, dtype: str) -> Found:
    found, used = {}, set()
    for key, blocks in tensors.items():
        stem = key.removesuffix("_blocks")
        if stem == key or f"{stem}_scales" not in tensors or len(blocks.shape) != 4:
            continue
        experts, outputs, groups, _ = blocks.shape
        shape = experts, groups * _MXFP4_GROUP, outputs
        stored = {"blocks": blocks, "scales": tensors[f"{stem}_scales"]}
        found[stem] = CodedSource(Mxfp4(shape[1]), shape, dtype, stored)
        used |= {key, f"{stem}_scales"}
    return found, used


def _bitsandbytes(described: Mapping[str, Any], tensors: Tensors, dtype: str) -> Found:
    if not described.get("load_in_4bit") or described.get("bnb_4bit_quant_type", "nf4") != "nf4":
        raise _Refusal(f"its weights are {'FP4' if described.get('load_in_4bit') else 'of 8 bits'}")
    found, used = {}, set()
    for key in tensors:
        stem = key.removesuffix(_NF4)
        if stem == key:
            continue
        state = json.loads(bytes(read_tensor(tensors[key]).tolist()))
        nested = "nested_offset" in state
        own = {"float16": "F16", "bfloat16": "BF16"}.get(str(state.get("dtype")), dtype)
        codec = Nf4(int(state["blocksize"]), nested, int(state.get("nested_blocksize", 256)), TORCH_NAMES[own])
        names = ["absmax", "quant_map", *(("nested_absmax", "nested_quant_map") if nested else ())]
        missing = [name for name in names if f"{stem}.{name}" not in tensors]
        if missing or stem not in tensors:
            raise _Refusal(f"{stem}.{(*missing, 'weight')[0]} is missing")
        stored = {"weight": _as_bytes(tensors[stem])} | {name: tensors[f"{stem}.{name}"] for name in names}
        given = {"nested_offset": torch.tensor([state["nested_offset"]], dtype=torch.float32)} if nested else {}
        found[stem] = CodedSource(codec, tuple(state["shape"]), own, stored, given)
        used |= {stem, key, *(f"{stem}.{name}" for name in names)}
    return found, used


def _as_bytes(packed: StoredTensor) -> StoredTensor:
    """Return a column of codes as the bytes that it is: `bnb_4bit_quant_storage` only names the dtype that FSDP sees."""
    return replace(packed, dtype="U8", shape=(packed.num_bytes, 1)) if packed.shape[1:] == (1,) else packed


def _own(described: Mapping[str, Any], tensors: Tensors, dtype: str) -> Found:
    own = {FORMAT: _ternary, BF16X12: _bf16x12, SPARSE: _sparse}.get(str(described.get("format")))
    if own is None:
        raise _Refusal(f"its format is {described.get('format')}")
    return own(tensors, dtype)


def _bf16x12(tensors: Tensors, dtype: str) -> Found:
    del dtype  # it is bfloat16
    found, used = {}, set()
    for key in tensors:
        stem = key.removesuffix("_low")
        if stem == key or f"{stem}_escapes" not in tensors:
            continue
        names = ("escape_offsets", "escapes", "low", "high", "bases")
        if missing := [name for name in ("shape", *names) if f"{stem}_{name}" not in tensors]:
            raise _Refusal(f"{stem}_{missing[0]} is missing")
        said = tensors[f"{stem}_shape"]
        shape = tuple(read_tensor(said).tolist()) if said.dtype == "I64" and len(said.shape) == 1 else ()
        stored = {name: tensors[f"{stem}_{name}"] for name in names}
        escapes = (stored["escapes"].shape or (0,))[0] - 1
        if len(shape) not in (2, 3) or min(shape) < 1 or escapes < 0:
            raise _Refusal(f"{stem} is said to have the shape {shape} and {escapes} escapes")
        found[stem] = CodedSource(Bf16x12(escapes), shape, "BF16", stored)
        used |= {f"{stem}_{name}" for name in ("shape", *names)}
    return found, used


def _sparse(tensors: Tensors, dtype: str) -> Found:
    del dtype  # it is bfloat16
    found, used = {}, set()
    for key, bitmap in tensors.items():
        stem = key.removesuffix("_bitmap")
        if stem == key or f"{stem}_offsets" not in tensors:
            continue
        names = ("offsets", "values", "bitmap")
        if missing := [name for name in ("shape", *names) if f"{stem}_{name}" not in tensors]:
            raise _Refusal(f"{stem}_{missing[0]} is missing")
        shape = tuple(read_tensor(tensors[f"{stem}_shape"]).tolist())
        stored = {name: tensors[f"{stem}_{name}"] for name in names}
        count = (stored["values"].shape or (0,))[0] - SPARE
        if len(shape) != 2 or min(shape) < 1 or count < 0:
            raise _Refusal(f"{stem} is said to have the shape {shape} and {count} numbers, its bitmap is {bitmap.shape}")
        found[stem] = CodedSource(Sparse(count), shape, "BF16", stored)
        used |= {f"{stem}_{name}" for name in ("shape", *names)}
    return found, used


def _ternary(tensors: Tensors, dtype: str) -> Found:
    dictionaries, used = _dictionaries(tensors)
    found = {}
    for key in tensors:
        stem = key.removesuffix("weight_levels")
        if stem == key:
            continue
        names = ("codes", "row_offsets", "levels") if f"{stem}weight_codes" in tensors else ("trits", "levels")
        missing = [name for name in (*names, "shape") if f"{stem}weight_{name}" not in tensors]
        if missing:
            raise _Refusal(f"{stem}weight_{missing[0]} is missing")
        rows, columns, zeros = (int(size) for size in read_tensor(tensors[f"{stem}weight_shape"]).tolist())
        if zeros and zeros not in dictionaries:
            raise _Refusal(f"the dictionary for {zeros} zeros in a thousand, which {stem}weight is in, is missing")
        stored = {name: tensors[f"{stem}weight_{name}"] for name in names}
        codec = WordsCodec(dictionaries[zeros], stored["codes"].shape[0]) if zeros else TritsCodec()
        found[f"{stem}weight"] = CodedSource(codec, (rows, columns), dtype, stored)
        used |= {f"{stem}weight_{name}" for name in (*names, "shape")}
    return found, used


def _dictionaries(tensors: Tensors) -> tuple[dict[int, Dictionary], set[str]]:
    """Return the dictionaries of a model by their thousandths of zeros; each table is checked against its digest."""
    found: dict[int, Dictionary] = {}
    used = {key for key in tensors if is_dictionary_table(key)}
    for key in sorted(used):
        if not key.startswith(TABLE):
            continue
        zeros, place = key.removeprefix(TABLE).split(".")
        noted = tensors.get(f"{DIGEST}{zeros}.{place}")
        digest = bytes(read_tensor(noted).tolist()).hex() if noted is not None else ""
        dictionary = Dictionary.from_table(int(zeros), read_tensor(tensors[key]).numpy().view(np.uint32), digest)
        if found.setdefault(int(zeros), dictionary).digest != digest:
            raise _Refusal(f"two dictionaries for {zeros} zeros in a thousand differ")
    return found, used


# By `quant_method`: what reads the weights, and the keys of `quantization_config` that it may find.
READERS: Mapping[str, tuple[Reader, Mapping[str, Rule]]] = {
    "compressed-tensors": (_compressed_tensors, KEYS["compressed-tensors"]),
    "fp8": (_fp8, KEYS["fp8"]),
    "mxfp4": (_mxfp4, KEYS["mxfp4"]),
    "bitsandbytes": (_bitsandbytes, KEYS["bitsandbytes"]),
    METHOD: (_own, anything("quant_method", "format", "ignore")),
}
