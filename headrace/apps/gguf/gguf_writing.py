"""A model directory becomes one GGUF file: the very thing that `gguf_directory` reads, backwards.

transformers' own table of keys makes the metadata, its names and order of tensors are turned round. Invariant: before a weight
is written, the file's configuration is read back, and is the model's; so what a file cannot say is refused by name.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.apps.gguf.gguf_words import WordsOf
from headrace.files.durable import appearing_file
from headrace.model.directory.checkpoint import Checkpoint
from headrace.model.gguf.gguf_directory import OTHER_NAMES, gguf_names_of, read_gguf_config, row_order_of
from headrace.model.gguf.gguf_rotations import FACTORS, llama3_factors
from headrace.model.stored.safetensors_file import StoredTensor, read_bytes
from headrace.terms.errors import ExportFailed, ModelError, has_no_space, in_one_line

OUT_TYPES = {"bf16": ("BF16", 32), "f16": ("F16", 1), "q8_0": ("Q8_0", 7)}  # with llama.cpp's number of such a file
_PIECE_NUMBERS = 1 << 24
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# What a configuration may say without a place in the file: how it was made or trained, and what tokens mean.
_ASIDE = {
    "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "model_type", "pad_token_id", "pretraining_tp", "resid_pdrop", "torch_dtype", "transformers_version", "unk_token_id",
    "use_cache", "max_window_layers",
}  # fmt: skip


def write_gguf(directory: Path, file: Path, kind: str | None = None) -> None:
    """Write the model in `directory` to `file` with matrices of `kind`, vectors in float32.

    `kind` is a name in OUT_TYPES; None: float16 if most weights are that, else bfloat16.

    Memory is a few pieces of 64 MiB, or a matrix of queries. The file appears whole or not at all.

    Raises:
        ModelError: the model, its configuration or its tokenizer has no form in GGUF that is known here.
        ExportFailed: there is no space, or the file cannot be written.
    """
    checkpoint = Checkpoint.open(directory, decode=True)
    try:
        with appearing_file(file) as place:
            _Writing(checkpoint, place, kind or ("f16" if checkpoint.main_dtype == "float16" else "bf16")).run()
    except OSError as error:
        words = "there is no space; free some" if has_no_space(error) else error.strerror or str(error)
        raise ExportFailed(f"export to {file}: {words}") from error


def refuse_unwritable(directory: Path) -> None:
    """Find out, from configuration and tokenizer alone, whether a model can become a GGUF file.

    Raises:
        ModelError: the package is missing, or the architecture or the tokenizer has no form in GGUF.
    """
    config = Checkpoint.open(directory, decode=True).config
    _section_of(config)
    _words_of(directory, config)


def _section_of(config: Any) -> tuple[str, Mapping[str, str | None]]:
    """Return the architecture's name in GGUF, and which key stands for which entry of the configuration."""
    try:
        import gguf
    except ImportError as error:
        raise ModelError("GGUF needs the package gguf; pip install gguf") from error
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    kind = config.model_type
    name = OTHER_NAMES.get(kind, kind)
    if name not in GGUF_CONFIG_MAPPING or name not in gguf.MODEL_ARCH_NAMES.values():
        raise ModelError(f"model: {kind} has no form in GGUF that transformers reads; leave the ending .gguf out")
    return name, GGUF_CONFIG_MAPPING[name]


def _words_of(directory: Path, config: Any) -> WordsOf:
    try:
        return WordsOf(directory, config.vocab_size)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model: {directory}: no GGUF file can be made: {in_one_line(error, 200)}") from error


class _Writing:
    def __init__(self, checkpoint: Checkpoint, place: Path, kind: str) -> None:
        self._checkpoint, self._place = checkpoint, place
        self._config = checkpoint.config
        self._architecture, self._keys = _section_of(self._config)
        self._kind, self._number = OUT_TYPES[kind]
        self._factors: np.ndarray | None = None
        self._tensors = list(self._listed())

    def run(self) -> None:
        from gguf import GGUFWriter

        writer = GGUFWriter(self._place, self._architecture)
        try:
            self._add_metadata(writer)
            _words_of(self._checkpoint.directory, self._config).add_to(writer)
            factors = np.empty(0, np.float32) if self._factors is None else self._factors
            sizes = [_announced(writer, FACTORS, factors.shape, "F32")] if factors.size else []
            sizes += [_announced(writer, name, tensor.shape, own) for name, _, tensor, own in self._tensors]
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            file: Any = (writer.fout or [])[0]
            end = _aligned(file.tell()) + sum(map(_aligned, sizes))
            file.seek(_aligned(file.tell()))
            factors.tofile(file)
            file.truncate(end)
            file.flush()
            self._compare()
            self._write_tensors(file)
        finally:
            writer.close()

    def _listed(self) -> Iterator[tuple[str, list[int], StoredTensor, str]]:
        """Yield name, order of rows, stored tensor and type of each tensor, as they will lie."""
        config = self._config
        names, processor = gguf_names_of(config, self._architecture)
        stored = dict(self._checkpoint.tensors)
        for name, own in names.items():
            if own not in stored and own == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if own not in stored:
                raise ModelError(f"model: no tensor {own}, which GGUF calls {name}")
            tensor = stored.pop(own)
            order = row_order_of(processor, name, tensor.shape)
            if order is None or (order and len(tensor.shape) == 1):
                raise ModelError(f"model: {own} has another form in GGUF files, which is not written; leave .gguf out")
            yield name, order, tensor, self._type_of(tensor)
        if config.tie_word_embeddings:
            stored.pop("lm_head.weight", None)
        if left := sorted(stored):
            raise ModelError(f"model: {left[0]} has no name in GGUF; leave the ending .gguf out")

    def _type_of(self, tensor: StoredTensor) -> str:
        if len(tensor.shape) == 1:
            return "F32"
        return "BF16" if self._kind == "Q8_0" and tensor.shape[-1] % 32 else self._kind

    def _add_metadata(self, writer: Any) -> None:
        config, name = self._config, self._architecture
        writer.add_name(self._checkpoint.directory.name)
        writer.add_file_type(self._number)
        writer.add_quantization_version(2)
        for key, entry in self._keys.items():
            value = config.rope_parameters["rope_theta"] if entry == "rope_theta" else getattr(config, entry or "", None)
            if isinstance(value, bool):
                writer.add_bool(f"{name}.{key}", value)
            elif isinstance(value, int):
                writer.add_uint32(f"{name}.{key}", value)
            elif isinstance(value, float):
                writer.add_float32(f"{name}.{key}", value)
        if size := getattr(config, "head_dim", None):
            writer.add_key_length(size)
            writer.add_value_length(size)
        rotation = getattr(config, "rope_parameters", None) or {}
        if rotation.get("rope_type") == "llama3":
            self._factors = llama3_factors(rotation, size or config.hidden_size // config.num_attention_heads)
        elif rotation.get("rope_type") == "linear":
            writer.add_string(f"{name}.rope.scaling.type", "linear")
            writer.add_float32(f"{name}.rope.scaling.factor", rotation["factor"])

    def _write_tensors(self, file: Any) -> None:
        for name, order, tensor, own in self._tensors:
            file.seek(_aligned(file.tell()))
            for piece in _pieces(tensor, order):
                _encoded(piece, own, name).tofile(file)

    def _compare(self) -> None:
        """Read the configuration back.

        Raises:
            ModelError: the file says another model.
        """
        found = read_gguf_config(self._place).to_dict()
        for key, value in self._config.to_dict().items():
            if key not in _ASIDE and key[0] != "_" and not _same(found.get(key), value):
                raise ModelError(
                    f"model: a GGUF file cannot say {key}: {value!r} of {self._config.model_type} (read back: "
                    f"{found.get(key)!r}); leave the ending .gguf out"
                )


def _same(found: Any, value: Any) -> bool:
    if isinstance(found, dict) and isinstance(value, dict):
        return all(_same(found.get(key), value.get(key)) for key in {*found, *value})
    if isinstance(found, float) and isinstance(value, int | float):
        return abs(found - value) <= 1e-6 * abs(value)
    return bool(found == value)


def _aligned(offset: int) -> int:
    """Return the next place at which a tensor may begin."""
    return -(-offset // 32) * 32


def _announced(writer: Any, name: str, shape: tuple[int, ...], kind: str) -> int:
    """Add a tensor to the list of a file, and return its bytes."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape

    own = GGMLQuantizationType[kind]
    num_bytes = int(np.prod(quant_shape_to_byte_shape(shape, own)))
    writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, raw_dtype=own)
    return num_bytes


def _pieces(tensor: StoredTensor, order: list[int]) -> Iterator[torch.Tensor]:
    """Yield a tensor's rows in the order of the file, some at a time; all at once where they change places."""
    dtype, columns = _DTYPES[tensor.dtype], tensor.shape[-1]
    rows_bytes = columns * dtype.itemsize
    size = tensor.num_bytes if order else max(1, _PIECE_NUMBERS // columns) * rows_bytes
    for piece in read_bytes(tensor, size):
        rows = torch.from_numpy(piece).view(dtype).view(-1, columns)
        if not order:
            yield rows
            continue
        places = torch.empty(len(order), dtype=torch.int64)
        places[torch.tensor(order)] = torch.arange(len(order))  # the model's row i is the file's row order[i]
        yield rows.view(len(order), -1)[places].view(-1, columns)


def _encoded(rows: torch.Tensor, kind: str, name: str) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants

    if kind == "BF16":
        return rows.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    numbers = rows.float()
    if kind == "F16" and bool((numbers.abs() > torch.finfo(torch.float16).max).any()):
        raise ModelError(f"model: {name} has numbers that float16 has not; give --outtype bf16")
    return np.asarray(quants.quantize(numbers.contiguous().numpy(), GGMLQuantizationType[kind]))
