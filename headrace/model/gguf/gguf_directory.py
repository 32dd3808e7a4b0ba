"""A model in one GGUF file becomes a model directory: configuration and tokenizer, and a table of where its tensors lie.

transformers' own reader of GGUF makes the configuration, the tokenizer and the names and order of tensors, and so bounds the
architectures. The directory is made once, in a cache; weights stay in the file, and are read and decoded there
(`gguf_tensors`). Invariant: a directory is complete or absent, and names a file that has all bytes of its tensors.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.codec.published.gguf_blocks import BLOCKS
from headrace.files.durable import appearing
from headrace.files.model_directory import read_configuration
from headrace.model.blocks.skeleton import build_skeleton
from headrace.model.gguf.gguf_rotations import read_rotation
from headrace.model.stored.gguf_tensors import PLAIN, TABLE
from headrace.terms.errors import ModelError, in_one_line, refusing

_VERSION = 3  # of what is in the directory
_MOST_BLOCKS = 2048
_MAGIC = b"GGUF"
# Architectures in GGUF by the model_type of a configuration, where transformers does not know them: without a window of
# attention, a Mistral is a Llama.
OTHER_NAMES = {"mistral": "llama"}
# Where a file names tokens that end an answer; the last two of them for the end of a turn, and of a message.
_END_KEYS = tuple(f"tokenizer.ggml.{name}" for name in ("eos_token_id", "eos_token_ids", "eom_token_id", "eot_token_id"))
_PARTS = "split.count"
_NAMES = {"F16": "float16", "F32": "float32"}


def gguf_directory(file: Path, cache: Path) -> Path:
    """Return the model directory for a GGUF file, which is made below `cache` if it is not there.

    Raises:
        ModelError: the file is no GGUF, is cut or damaged, or holds an architecture or a type of weights that is not read.
    """
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(_MAGIC))
        found = file.stat()
    except OSError as error:
        raise ModelError(f"model: {file}: cannot be read ({error.strerror}); give a GGUF file or a model directory") from error
    if magic != _MAGIC:
        raise ModelError(f"model: {file}: begins with {magic!r}, no GGUF file; fetch it again")
    key = repr((_VERSION, str(file.resolve()), found.st_size, found.st_mtime_ns))
    directory = cache / "gguf" / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if not (directory / TABLE).exists():
        try:
            with appearing(directory) as partial:
                _fill(partial, file.resolve())
        except OSError as error:
            raise ModelError(f"{directory}: cannot be written ({error.strerror}); it keeps what was read of {file}") from error
    return directory


def _fill(directory: Path, file: Path) -> None:
    reader = _opened(file)
    words = f"{file}: cannot be read as a model; fetch it again, or give the model as safetensors"
    with refusing(words):
        from transformers import AutoTokenizer, GenerationConfig

        config = _config(file, reader)
        largest = max(reader.tensors, key=lambda tensor: int(tensor.n_bytes))
        config.dtype = _NAMES.get(largest.tensor_type.name, "bfloat16")
        config.save_pretrained(directory)
    read_configuration(directory / "config.json")  # counts that no model has
    tensors = list(_tensors(file, reader, config))
    if any(tensor["kind"] not in PLAIN or tensor["order"] for tensor in tensors):
        config.quantization_config = {"quant_method": "gguf"}  # as other coded models have it
        config.save_pretrained(directory)
    with refusing(words):
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
        tokenizer.save_pretrained(directory)
        marks = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": _ends(reader, tokenizer.eos_token_id)}
        GenerationConfig(**marks, pad_token_id=tokenizer.pad_token_id).save_pretrained(directory)
    table = {"file": str(file), "num_bytes": file.stat().st_size, "tensors": tensors}
    (directory / TABLE).write_text(json.dumps(table), encoding="utf-8")


def _ends(reader: Any, own: int | None) -> int | list[int] | None:
    """Return the tokens that end an answer: the tokenizer's `own`, and those that a file names for turns and messages."""
    found = [] if own is None else [own]
    for key in _END_KEYS:
        value = reader.fields[key].contents() if key in reader.fields else []
        found += value if isinstance(value, list) else [value]
    ends = list(dict.fromkeys(map(int, found)))
    return ends if len(ends) > 1 else next(iter(ends), None)


def read_gguf_config(file: Path) -> Any:
    """Return the configuration that a GGUF file says.

    Raises:
        ModelError: it cannot be read, or says what is not known.
    """
    with refusing(f"{file}: cannot be read as a model"):
        return _config(file, _opened(file))


def _config(file: Path, reader: Any) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    given = getattr(config, "rope_parameters", None)  # of most architectures the reader takes the base alone
    if given and given.get("rope_type", "default") == "default" and (found := read_rotation(reader, given["rope_theta"])):
        config.rope_parameters = {**given, **found}
    return config


def _opened(file: Path) -> Any:
    """Return the package's reader of a file, whose tensors all lie within it.

    Raises:
        ModelError: the package is missing, or the file is cut or damaged.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError(f"{file}: GGUF needs the package gguf; pip install gguf") from error
    try:
        reader = GGUFReader(file)
        parts = int(reader.fields[_PARTS].contents()) if _PARTS in reader.fields else 1
        blocks = [field.contents() for name, field in reader.fields.items() if name.endswith(".block_count")]
    except Exception as error:  # whatever the package raises for what a file may hold
        raise ModelError(f"{file}: the GGUF file is cut or damaged ({in_one_line(error, 80)}); fetch it again") from error
    if parts > 1:
        raise ModelError(
            f"model: {file}: is one of {parts} files of a model, which are not read together; make them one file, by "
            "`llama-gguf-split --merge FIRST OUT.gguf`, and give that"
        )
    if any(not isinstance(count, int) or not 0 < count <= _MOST_BLOCKS for count in blocks):
        raise ModelError(f"{file}: the GGUF file says it has {blocks} blocks; at most {_MOST_BLOCKS} can be: fetch it again")
    size = file.stat().st_size
    for tensor in reader.tensors:
        if int(tensor.data_offset) + int(tensor.n_bytes) > size:
            raise ModelError(f"{file}: tensor {tensor.name} ends behind the file's {size} bytes; it is cut: fetch it again")
    return reader


def _tensors(file: Path, reader: Any, config: Any) -> Iterator[dict[str, Any]]:
    """Yield each tensor of the model: its name there, type, place, shape, and the order of its rows in the file.

    Raises:
        ModelError: a tensor has a type that is not read, or is changed by more than the order of its rows.
    """
    architecture = str(reader.fields["general.architecture"].contents())
    with refusing(f"{file}: the names of its tensors are not those of {type(config).__name__}"):
        names, processor = gguf_names_of(config, architecture)
    for tensor in reader.tensors:
        if (name := names.get(tensor.name)) is None:
            continue  # such as frequencies of rotary embeddings; what is missing is found when parameters are matched
        kind, shape = tensor.tensor_type.name, tuple(int(size) for size in reversed(tensor.shape))
        if kind not in BLOCKS:
            raise ModelError(f"{file}: {tensor.name} is of type {kind}; read are {', '.join(BLOCKS)}")
        order = row_order_of(processor, tensor.name, shape)
        if order is None or (order and len(shape) == 1):
            raise ModelError(
                f"{file}: {tensor.name} of {architecture} is stored in another form than the model computes; "
                "give the model as safetensors"
            )
        yield {
            "name": name,
            "kind": kind,
            "offset": int(tensor.data_offset),
            "num_bytes": int(tensor.n_bytes),
            "shape": shape,
            "order": order,
        }


def gguf_names_of(config: Any, architecture: str) -> tuple[Mapping[str, str], Any]:
    """Return the names of a model's tensors by their names in GGUF, and transformers' code that puts them in form."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    kind = architecture if config.model_type in OTHER_NAMES else None
    return get_gguf_hf_weights_map(build_skeleton(config, torch.bfloat16), processor, kind), processor


def row_order_of(processor: Any, name: str, shape: tuple[int, ...]) -> list[int] | None:
    """Return which row of the file is which row of the model, [] for the same order; None if more than that is changed.

    transformers' own code for the tensor is asked: with the number of each row in the place of its weights.
    """
    numbers = np.arange(1, shape[0] + 1, dtype=np.float32)
    given = np.broadcast_to(numbers.reshape(-1, *(1 for _ in shape[1:])), (shape[0], *(1 for _ in shape[1:])))
    try:
        found = processor.process(weights=given.copy(), name=name, parsed_parameters={"tensors": {}}).weights
    except Exception:  # it does more than change an order
        return None
    if np.shape(found) != given.shape:
        return None
    order = np.asarray(found).reshape(-1)
    if np.array_equal(order, numbers):
        return []
    return [int(row) - 1 for row in order] if np.array_equal(np.sort(order), numbers) else None
