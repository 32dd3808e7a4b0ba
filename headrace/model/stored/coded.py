"""Model directories with coded weights: which stored tensors are the parts of which weight, and how they are decoded.

For all other code such a weight is an ordinary stored tensor with the model's shape. Its rows are decoded as they are read.
Invariant: a weight has all of its parts, in the shapes of its code, or `ModelError` says what is missing.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from headrace.codec.bf16x12 import Bf16x12
from headrace.codec.dictionary import Dictionary
from headrace.codec.sparse import Sparse
from headrace.codec.sparse_loops import SPARE
from headrace.codec.table import CODES
from headrace.codec.targets import BF16X12, DIGEST, FORMAT, METHOD, SPARSE, TABLE, is_dictionary_table
from headrace.codec.ternary import TritsCodec, WordsCodec
from headrace.model.stored.coded_keys import KEYS, Rule, anything, refused_keys
from headrace.model.stored.coded_source import TORCH_NAMES, CodedSource, Found, Reader, Refusal, Tensors, read_tensor
from headrace.model.stored.published_readers import PUBLISHED
from headrace.model.stored.safetensors_file import StoredTensor
from headrace.terms.coding import as_matrix
from headrace.terms.errors import ModelError


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
        raise ModelError(
            f"{directory}: its weights are coded by {method}, which is not read; read are {_read()}. {_elsewhere(method)}"
        )
    reader, rules = READERS[method]
    if refused := refused_keys(rules, described):
        raise ModelError(
            f"{directory}: quantization_config has {', '.join(refused)}, which would change results and is not supported. "
            "Use a model without it, or decode it with the program that wrote it"
        )
    try:
        found, used = reader(described, tensors, dtype)
    except Refusal as error:
        raise ModelError(f"{directory}: its weights are coded by {method}, and {error}; read are {_read()}") from error
    if not found:
        raise ModelError(
            f"{directory}: quantization_config says that weights are coded by {method}, and none has parts of it; the files "
            f"are of another format, or decoded; read are {_read()}"
        )
    for key, source in found.items():
        _check(directory, key, source)
    made = {key: _weight(key, source) for key, source in found.items()}
    return {key: tensor for key, tensor in tensors.items() if key not in used} | made


def _read() -> str:
    *most, last = dict.fromkeys(code.files for code in CODES.values())
    return f"{', '.join(most)} and {last}"


# What decodes, or writes in a format that is read, models of these methods.
_TOOLS = {
    "hqq": "hqq's `dequantize`",
    "aqlm": "vLLM, or the model it was made of",
    "quanto": "optimum-quanto's `freeze` and `dequantize`",
    "torchao": "torchao's `dequantize`",
    "eetq": "the model it was made of",
    "vptq": "the model it was made of",
}


def _elsewhere(method: str) -> str:
    tool = _TOOLS.get(method, "llm-compressor")
    return f"Convert it with {tool}: save_pretrained of decoded weights in bfloat16, or another model in one of these formats"


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


def _own(described: Mapping[str, Any], tensors: Tensors, dtype: str) -> Found:
    own = {FORMAT: _ternary, BF16X12: _bf16x12, SPARSE: _sparse}.get(str(described.get("format")))
    if own is None:
        raise Refusal(f"its format is {described.get('format')}")
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
            raise Refusal(f"{stem}_{missing[0]} is missing")
        said = tensors[f"{stem}_shape"]
        shape = tuple(read_tensor(said).tolist()) if said.dtype == "I64" and len(said.shape) == 1 else ()
        stored = {name: tensors[f"{stem}_{name}"] for name in names}
        escapes = (stored["escapes"].shape or (0,))[0] - 1
        if len(shape) not in (2, 3) or min(shape) < 1 or escapes < 0:
            raise Refusal(f"{stem} is said to have the shape {shape} and {escapes} escapes")
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
            raise Refusal(f"{stem}_{missing[0]} is missing")
        shape = tuple(read_tensor(tensors[f"{stem}_shape"]).tolist())
        stored = {name: tensors[f"{stem}_{name}"] for name in names}
        count = (stored["values"].shape or (0,))[0] - SPARE
        if len(shape) != 2 or min(shape) < 1 or count < 0:
            raise Refusal(f"{stem} is said to have the shape {shape} and {count} numbers, its bitmap is {bitmap.shape}")
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
            raise Refusal(f"{stem}weight_{missing[0]} is missing")
        rows, columns, zeros = (int(size) for size in read_tensor(tensors[f"{stem}weight_shape"]).tolist())
        if zeros and zeros not in dictionaries:
            raise Refusal(f"the dictionary for {zeros} zeros in a thousand, which {stem}weight is in, is missing")
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
            raise Refusal(f"two dictionaries for {zeros} zeros in a thousand differ")
    return found, used


# By `quant_method`: what reads the weights, and the keys of `quantization_config` that it may find.
READERS: Mapping[str, tuple[Reader, Mapping[str, Rule]]] = {
    **{method: (reader, KEYS[method]) for method, reader in PUBLISHED.items()},
    METHOD: (_own, anything("quant_method", "format", "ignore")),
}
