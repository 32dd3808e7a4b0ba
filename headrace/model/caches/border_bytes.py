"""Borders as bytes, for files: a description in JSON, then the tensors one after the other.

Invariant: what is read from the bytes of a border is that border; nothing in them is executed.
"""

import json
from typing import Any

import numpy as np
import torch

from headrace.codec.cache_codes import CACHE_CODES
from headrace.model.caches.borders import BlockBorder, ChunkBorder
from headrace.model.caches.tiered_cache import StoredForm, form_in
from headrace.terms.errors import ModelError

_LENGTH_BYTES = 8
_PLAIN = (type(None), bool, int, float, str)


def bytes_of_border(border: ChunkBorder) -> bytes:
    """Return a border as bytes.

    Raises:
        ModelError: a layer or a module keeps something else than numbers, texts and tensors.
    """
    tensors: list[torch.Tensor] = []
    blocks = [
        [_form(each.form), *(_described(part, tensors) for part in (each.tokens, each.state, each.modules))]
        for each in border.blocks
    ]
    shapes = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in tensors]
    head = json.dumps({"blocks": blocks, "tensors": shapes}).encode()
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *flat])


def border_from(content: bytes) -> ChunkBorder:
    """Return the border that `bytes_of_border` wrote."""
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    head = json.loads(content[_LENGTH_BYTES:start])
    tensors = list[torch.Tensor]()
    for name, shape in head["tensors"]:
        dtype = getattr(torch, name)
        stop = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        flat = torch.frombuffer(bytearray(content[start:stop]), dtype=dtype) if stop > start else torch.empty(0, dtype=dtype)
        tensors.append(flat.view(shape))
        start = stop
    blocks = [BlockBorder(_form_from(form), *(_from(part, tensors) for part in parts)) for form, *parts in head["blocks"]]
    return ChunkBorder(tuple(blocks))


def _form(form: StoredForm | None) -> Any:
    return None if form is None else [str(form.dtype).removeprefix("torch."), form.key, form.value, form.code_name]


def _form_from(found: Any) -> StoredForm | None:
    if found is None:
        return None
    name, key, value, code = found
    return form_in(getattr(torch, name), tuple(key), tuple(value), CACHE_CODES.get(code))


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return `value` as JSON has it; tensors are added to `tensors`.

    Raises:
        ModelError: there is something else in it.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, torch.dtype | torch.device):
        return {"torch": type(value).__name__, "name": str(value).removeprefix("torch.")}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_described(each, tensors) for each in value]}
    if type(value) is dict:
        return {"dict": [[_described(key, tensors), _described(each, tensors)] for key, each in value.items()]}
    raise ModelError(f"a cache keeps a {type(value).__name__}, which is not written into files")


def _from(value: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "torch" in value:
        return getattr(torch, value["name"]) if value["torch"] == "dtype" else torch.device(value["name"])
    if "dict" in value:
        return {_from(key, tensors): _from(each, tensors) for key, each in value["dict"]}
    kind, items = next(iter(value.items()))
    return (list if kind == "list" else tuple)(_from(each, tensors) for each in items)
