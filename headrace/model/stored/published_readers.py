"""Which stored tensors are the parts of a weight, in the formats in which others publish: one reader for each `quant_method`.

Readers know a weight by its parts, for a configuration says of a file's formats only some. Scales of activations are passed
over: activations are not rounded here, and products are those of the decoded weights.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from headrace.codec.published import Fp4Blocks, Fp8Blocks, Int8Rows, IntGroups, Mxfp4, Nf4, PackQuantized
from headrace.codec.published.int_groups import NAMES
from headrace.model.stored.coded_source import TORCH_NAMES, CodedSource, Found, Reader, Refusal, Tensors, read_tensor
from headrace.model.stored.safetensors_file import StoredTensor

_NF4, _MXFP4_GROUP = ".quant_state.bitsandbytes__nf4", 32
_FORMATS = ("pack-quantized", "nvfp4-pack-quantized", "float-quantized", "mixed-precision")
_OF_ACTIVATIONS = ("input_scale", "input_global_scale", "input_zero_point")


def _compressed_tensors(described: Mapping[str, Any], tensors: Tensors, dtype: str) -> Found:
    groups = (described.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    block = next((_pair(each.get("block_structure")) for each in weights), None)
    said = {int(each.get("num_bits") or 4) for each in weights}
    formats = {str(group.get("format") or described.get("format")) for group in groups}
    if unknown := formats.difference(_FORMATS):
        raise Refusal(f"its format is {', '.join(sorted(unknown))}")
    found, used = {}, set()
    for key, codes in tensors.items():
        for suffix in ("weight_packed", "weight"):
            stem = key.removesuffix(suffix)
            scale = tensors.get(f"{stem}weight_scale") if stem != key else None
            if scale is not None or (stem != key and suffix == "weight_packed"):
                break
        else:
            continue
        if scale is None or len(scale.shape) > 2:
            raise Refusal(f"{stem}weight_scale is missing, or no table")
        if suffix == "weight":
            found[key] = _fp8_weight(codes, scale, block, dtype)
        elif codes.dtype == "U8":
            found[f"{stem}weight"] = _nvfp4(tensors, stem, codes, "weight_global_scale", dtype)
        else:
            found[f"{stem}weight"] = _packed(tensors, stem, codes, scale, said, dtype)
        used |= {f"{stem}{name}" for name in (*NAMES["packed"], suffix, "weight_shape", *_OF_ACTIVATIONS)}
        used.add(f"{stem}weight_global_scale")
    return found, used


def _packed(
    tensors: Tensors, stem: str, words: StoredTensor, scale: StoredTensor, said: Collection[int], dtype: str
) -> CodedSource:
    """Return the source of int32 words of four or eight bits, one of those that are `said`."""
    shape = tensors.get(f"{stem}weight_shape")
    rows, columns = words.shape[0], words.shape[1] * 32 // min(said, default=4)
    if shape is not None:
        rows, columns = (int(size) for size in read_tensor(shape).tolist())
    bits = next((bits for bits in (4, 8) if bits in said and -(-columns * bits // 32) == words.shape[1]), 0)
    if not bits or len(scale.shape) != 2:
        raise Refusal(f"{stem}weight_packed has {words.shape[1]} words for {columns} columns: neither four bits nor eight")
    codes, scales, zeros, order = NAMES["packed"]
    stored = {name: tensors[f"{stem}{name}"] for name in (codes, scales, zeros, order) if f"{stem}{name}" in tensors}
    group = 0 if scale.shape[1] == 1 else columns // scale.shape[1]
    if order in stored and _in_order(stored[order], columns // scale.shape[1]):
        del stored[order]
    of = TORCH_NAMES[scale.dtype]
    codec: PackQuantized | IntGroups = PackQuantized(group, of, symmetric=zeros not in stored)
    if bits == 8 or order in stored:
        codec = IntGroups("packed", group, of, bits, symmetric=zeros not in stored, ordered=order in stored)
    return CodedSource(codec, (rows, columns), _own_dtype(scale, dtype), stored)


def _own_dtype(scale: StoredTensor, dtype: str) -> str:
    return scale.dtype if scale.dtype in ("BF16", "F16") else dtype


def _in_order(order: StoredTensor, group: int) -> bool:
    """Return whether neighbouring columns are in a group."""
    groups = read_tensor(order)
    return bool((groups == torch.arange(len(groups)) // group).all())


def _nvfp4(tensors: Tensors, stem: str, codes: StoredTensor, whole: str, dtype: str) -> CodedSource:
    if (shared := tensors.get(f"{stem}{whole}")) is None:
        raise Refusal(f"{stem}{whole} is missing")
    scale = tensors[f"{stem}weight_scale"]
    columns = 2 * codes.shape[-1]
    codec = Fp4Blocks(columns // max(1, scale.shape[-1]), TORCH_NAMES[scale.dtype], whole)
    stored = {"weight_packed": codes, "weight_scale": scale, whole: replace(shared, shape=(1,))}
    return CodedSource(codec, (codes.shape[0], columns), dtype, stored)


def _pair(said: Any) -> tuple[int, int] | None:
    return (int(said[0]), int(said[1])) if isinstance(said, list | tuple) and len(said) == 2 else None


def _fp8_weight(codes: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None, dtype: str) -> CodedSource:
    """Return the source of FP8 with scales of blocks, of rows (`channel`), or one of the whole."""
    if codes.dtype != "F8_E4M3" or len(codes.shape) != 2:
        raise Refusal(f"{codes.key} is {TORCH_NAMES[codes.dtype]} of shape {codes.shape}: no matrix of float8_e4m3fn")
    rows, columns = codes.shape
    if block is None:
        shape = (*scale.shape, 1, 1)[0], (*scale.shape, 1, 1)[1]
        block = {(1, 1): (rows, columns), (rows, 1): (1, columns)}.get(shape)
        if block is None:
            raise Refusal(f"{scale.key} has the shape {scale.shape}: without a block size, one scale or one a row is read")
        scale = replace(scale, shape=shape)
    codec = Fp8Blocks(*block, TORCH_NAMES[scale.dtype])
    return CodedSource(codec, codes.shape, dtype, {"weight": codes, "weight_scale_inv": scale})


def _fp8(described: Mapping[str, Any], tensors: Tensors, dtype: str) -> Found:
    block = _pair(described.get("weight_block_size"))
    found, used = {}, set()
    for key, codes in tensors.items():
        names = (f"{key}_scale_inv", f"{key}_scale", f"{key.removesuffix('weight')}scale")
        own = next((name for name in names if name in tensors and name != key), None)
        if own is None or codes.dtype not in ("F8_E4M3", "I8", "U8"):
            continue
        if codes.dtype == "F8_E4M3":
            found[key] = _fp8_weight(codes, tensors[own], block, dtype)
        else:  # experts of four bits (`expert_dtype: fp4`)
            shape = codes.shape[0], 2 * codes.shape[1]
            stored = {"weight_packed": replace(codes, dtype="U8"), "weight_scale": tensors[own]}
            codec = Fp4Blocks(_MXFP4_GROUP, TORCH_NAMES[tensors[own].dtype], "")
            found[key] = CodedSource(codec, shape, dtype, stored)
        used |= {key, own, *(f"{key.removesuffix('weight')}{name}" for name in _OF_ACTIVATIONS)}
    return found, used


def _modelopt(described: Mapping[str, Any], tensors: Tensors, dtype: str) -> Found:
    found, used = {}, set()
    for key, codes in tensors.items():
        stem = key.removesuffix("weight")
        scale = tensors.get(f"{stem}weight_scale")
        if stem == key or scale is None:
            continue
        four = codes.dtype == "U8"
        found[key] = _nvfp4(tensors, stem, codes, "weight_scale_2", dtype) if four else _fp8_weight(codes, scale, None, dtype)
        used |= {f"{stem}{name}" for name in ("weight", "weight_scale", "weight_scale_2", *_OF_ACTIVATIONS)}
    return found, used


def _words_by_columns(layout: str, bits: int, tensors: Tensors) -> Found:
    """Return what AWQ and GPTQ share: `qweight`, `qzeros`, `scales`."""
    found, used = {}, set()
    for key, words in tensors.items():
        stem = key.removesuffix("qweight")
        if stem == key:
            continue
        names = NAMES[layout]
        if missing := [name for name in names[:3] if f"{stem}{name}" not in tensors]:
            raise Refusal(f"{stem}{missing[0]} is missing")
        in_word = 32 // bits
        columns, rows = words.shape[0], words.shape[1]
        shape = (rows * in_word, columns) if layout == "awq" else (rows, columns * in_word)
        scale = tensors[f"{stem}scales"]
        groups = scale.shape[0] if len(scale.shape) == 2 else 0
        if not groups or shape[1] % groups:
            raise Refusal(f"{stem}scales has the shape {scale.shape} for {shape[1]} columns")
        stored = {name: tensors[f"{stem}{name}"] for name in names[:3]}
        order = tensors.get(f"{stem}{names[3]}") if names[3] else None
        if ordered := order is not None and not _in_order(order, shape[1] // groups):
            stored[names[3]] = order
        group = 0 if groups == 1 else shape[1] // groups
        codec = IntGroups(layout, group, TORCH_NAMES[scale.dtype], bits, ordered=ordered)
        found[f"{stem}weight"] = CodedSource(codec, shape, _own_dtype(scale, "F16"), stored)
        used |= {f"{stem}{name}" for name in names}
    return found, used


def _awq(described: Mapping[str, Any], tensors: Tensors, dtype: str) -> Found:
    return _words_by_columns("awq", 4, tensors)


def _gptq(described: Mapping[str, Any], tensors: Tensors, dtype: str) -> Found:
    layout = str(described.get("checkpoint_format") or "gptq")
    return _words_by_columns(layout, int(described.get("bits", 4)), tensors)


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
    if described.get("load_in_8bit"):
        return _int8(tensors, dtype)
    if not described.get("load_in_4bit") or described.get("bnb_4bit_quant_type", "nf4") != "nf4":
        raise Refusal(f"its weights are {'FP4' if described.get('load_in_4bit') else 'of neither 4 bits nor 8'}")
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
            raise Refusal(f"{stem}.{(*missing, 'weight')[0]} is missing")
        stored = {"weight": _as_bytes(tensors[stem])} | {name: tensors[f"{stem}.{name}"] for name in names}
        given = {"nested_offset": torch.tensor([state["nested_offset"]], dtype=torch.float32)} if nested else {}
        found[stem] = CodedSource(codec, tuple(state["shape"]), own, stored, given)
        used |= {stem, key, *(f"{stem}.{name}" for name in names)}
    return found, used


def _as_bytes(packed: StoredTensor) -> StoredTensor:
    """Return a column of codes as the bytes that it is: `bnb_4bit_quant_storage` only names the dtype that FSDP sees."""
    return replace(packed, dtype="U8", shape=(packed.num_bytes, 1)) if packed.shape[1:] == (1,) else packed


def _int8(tensors: Tensors, dtype: str) -> Found:
    found, used = {}, set()
    for key, scale in tensors.items():
        stem = key.removesuffix("SCB")
        if stem == key or f"{stem}weight" not in tensors:
            continue
        codes = tensors[f"{stem}weight"]
        found[codes.key] = CodedSource(Int8Rows(), codes.shape, dtype, {"weight": codes, "SCB": scale})
        used |= {key, codes.key, f"{stem}weight_format"}
    return found, used


PUBLISHED: Mapping[str, Reader] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
