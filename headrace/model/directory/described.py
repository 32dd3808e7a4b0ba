"""The checkpoint that a configuration of a coded model describes, before its files are here: which tensors they would hold.

Stored names are those of transformers' own reversed rules, parts and their sizes those of the codes. Sizes are exact if files
keep to the format: only data are missing. Invariant: what is described goes through the reader of real files, with its checks.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from headrace.codec import Codec
from headrace.codec.published import Fp4Blocks, Fp8Blocks, IntGroups, Mxfp4, PackQuantized
from headrace.model.blocks.find_blocks import quantisation_of
from headrace.model.blocks.skeleton import build_skeleton
from headrace.model.directory.checkpoint import Checkpoint
from headrace.model.stored.coded import decoded_tensors
from headrace.model.stored.coded_source import TORCH_NAMES
from headrace.model.stored.safetensors_file import StoredTensor
from headrace.terms.errors import ConfigError

_NAMES = {name: short for short, name in TORCH_NAMES.items()}
Shape = tuple[int, ...]
# The codec of a stored weight of that name and shape, what stands before its parts' names, and parts with other names in files.
# None if it is not coded.
CodeOf = Callable[[str, Shape], tuple[Codec, str, Mapping[str, str]] | None]
Named = tuple[Codec, Mapping[str, str]]


def describe(path: Path, config: Any) -> Checkpoint:
    """Return the checkpoint that `config`, which has a `quantization_config`, describes; `path` is its config.json.

    Raises:
        ConfigError: only files say how small the weights of its code are.
        ModelError: the code is refused.
    """
    described = config.quantization_config
    described = dict(described if isinstance(described, Mapping) else described.to_dict())
    plain = copy.deepcopy(config)
    del plain.quantization_config
    dtype = str(getattr(config.get_text_config(), "dtype", None) or "bfloat16").removeprefix("torch.")
    skeleton = build_skeleton(plain, getattr(torch, dtype))
    make = _CODES.get(str(described.get("quant_method")))
    code_of = make(described, skeleton) if make else None
    if code_of is None:
        raise ConfigError(
            f"model: its weights are coded by {quantisation_of(config)}, and only its files say how small they are. Sizes "
            "follow from config.json for awq, gptq, mxfp4, NVFP4, fp8, and compressed-tensors with one group of targets; give "
            "the directory with the files"
        )
    tensors, offset = dict[str, StoredTensor](), 0
    for key, shape, name in _stored(skeleton, dtype, code_of):
        num_bytes = prod(shape) * getattr(torch, name).itemsize
        tensors[key] = StoredTensor(key, path, offset, num_bytes, _NAMES[name], shape)
        offset += num_bytes
    return Checkpoint(path.parent, plain, decoded_tensors(path.parent, config, tensors))


def _stored(skeleton: Any, dtype: str, code_of: CodeOf) -> Iterator[tuple[str, Shape, str]]:
    """Yield name, shape and dtype of each tensor of the files."""
    weights = {name: each.detach() for name, each in skeleton.named_parameters()}
    for key, weight in revert_weight_conversion(skeleton, weights).items():
        shape = tuple(weight.shape)
        if (found := code_of(key, shape)) is None:
            yield key, shape, dtype
            continue
        codec, stem, names = found
        for part in codec.places(prod(shape[:-1]), shape[-1]):
            yield f"{stem}{names.get(part.name, part.name)}", part.shape, part.dtype


def _of_mxfp4(described: Mapping[str, Any], skeleton: Any) -> CodeOf:
    left = described.get("modules_to_not_convert") or ()

    def code_of(key: str, shape: Shape) -> tuple[Codec, str, Mapping[str, str]] | None:
        coded = len(shape) == 3 and not _is_left(key, left)
        return (Mxfp4(shape[1]), f"{key}_", {}) if coded else None

    return code_of


def _of_fp8(described: Mapping[str, Any], skeleton: Any) -> CodeOf:
    block, left = described.get("weight_block_size"), described.get("modules_to_not_convert") or ("lm_head",)
    sizes = (int(block[0]), int(block[1])) if isinstance(block, list | tuple) and len(block) == 2 else None
    four = described.get("expert_dtype") == "fp4"

    def codec(key: str, shape: Shape) -> Codec | Named:
        if four and ".experts." in key:
            return Fp4Blocks(32, "float8_e8m0fnu", ""), {"weight_packed": "weight", "weight_scale": "weight_scale_inv"}
        rows, columns = sizes or shape
        return Fp8Blocks(rows, columns)

    return _of_products(skeleton, left, codec)


def _of_compressed_tensors(described: Mapping[str, Any], skeleton: Any) -> CodeOf | None:
    groups, left = list((described.get("config_groups") or {}).values()), described.get("ignore") or ()
    if len(groups) != 1 or list(groups[0].get("targets") or ()) != ["Linear"]:
        return None
    weights = groups[0].get("weights") or {}
    group, symmetric, strategy = weights.get("group_size") or 0, weights.get("symmetric", True), weights.get("strategy")

    def codec(key: str, shape: Shape) -> Codec | Named:
        if weights.get("type") == "float" and weights.get("num_bits") == 4:
            return Fp4Blocks(group or 16)
        if weights.get("type") == "float":
            rows, columns = weights.get("block_structure") or (shape if strategy == "tensor" else (1, shape[1]))
            return Fp8Blocks(rows, columns, "bfloat16"), {"weight_scale_inv": "weight_scale"}
        if weights.get("num_bits") == 8:
            return IntGroups("packed", group, "bfloat16", 8, symmetric=symmetric)
        return PackQuantized(group, symmetric=symmetric)

    return _of_products(skeleton, left, codec)


def _of_modelopt(described: Mapping[str, Any], skeleton: Any) -> CodeOf:
    left = described.get("ignore") or described.get("exclude_modules") or ()

    def codec(key: str, shape: Shape) -> Codec | Named:
        if described.get("quant_algo") == "FP8":
            return Fp8Blocks(shape[0], shape[1]), {"weight_scale_inv": "weight_scale"}
        return Fp4Blocks(16, whole="weight_scale_2"), {"weight_packed": "weight"}

    return _of_products(skeleton, left, codec)


def _of_words_by_columns(described: Mapping[str, Any], skeleton: Any) -> CodeOf:
    """Return that of AWQ and GPTQ. Groups of columns that a file may list take some bytes a column more."""
    left = described.get("modules_to_not_convert") or ("lm_head",)
    method, group = str(described["quant_method"]), int(described.get("group_size", described.get("q_group_size", 128)))
    layout = str(described.get("checkpoint_format") or "gptq") if method == "gptq" else "awq"
    codec = IntGroups(layout, max(0, group), bits=int(described.get("bits", described.get("w_bit", 4))))
    return _of_products(skeleton, left, lambda key, shape: codec)


def _of_products(skeleton: Any, left: Sequence[str], codec: Callable[[str, Shape], "Codec | Named"]) -> CodeOf:
    is_product = _products(skeleton)

    def code_of(key: str, shape: Shape) -> tuple[Codec, str, Mapping[str, str]] | None:
        if not is_product(key, shape) or _is_left(key, left):
            return None
        found = codec(key, shape)
        own, names = found if isinstance(found, tuple) else (found, {})
        return (own, key.removesuffix("weight"), names) if own.takes(*shape) else None

    return code_of


def _products(skeleton: Any) -> Callable[[str, Shape], bool]:
    """Return what says whether a stored weight is that of a linear product: a module of that kind, or one of an expert."""
    linear = {f"{name}.weight" for name, module in skeleton.named_modules() if isinstance(module, nn.Linear)}
    return lambda key, shape: len(shape) == 2 and key.endswith(".weight") and (key in linear or ".experts." in key)


def _is_left(key: str, left: Sequence[str]) -> bool:
    """Return whether a weight belongs to a module that is not coded: its name, a part of it, a pattern, or `re:` and one."""
    module = key.rpartition(".")[0]
    return any(
        re.match(name[3:], module) if name.startswith("re:") else name in module or fnmatch(key, f"*{name}*") for name in left
    )


_CODES: Mapping[str, Callable[[Mapping[str, Any], Any], CodeOf | None]] = {
    "mxfp4": _of_mxfp4,
    "fp8": _of_fp8,
    "compressed-tensors": _of_compressed_tensors,
    "modelopt": _of_modelopt,
    "awq": _of_words_by_columns,
    "gptq": _of_words_by_columns,
}
