"""A Hugging Face model directory: configuration, shards, and which tensor lies where.

Only headers are read. Invariant: an opened checkpoint has every tensor that its index promises, whole.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from headrace.files.model_directory import read_configuration, refuse_no_model, why_unreachable
from headrace.model.blocks.find_blocks import quantisation_of
from headrace.model.blocks.text_part import text_part
from headrace.model.stored.coded import decoded_tensors
from headrace.model.stored.coded_keys import notes_on_activations
from headrace.model.stored.gguf_tensors import gguf_tensors, is_gguf_directory
from headrace.model.stored.safetensors_file import WEIGHT_DTYPES, StoredTensor, read_header
from headrace.terms.errors import ModelError, in_one_line, shortened
from headrace.terms.json_text import parse_json

# What safetensors calls the dtypes of weights, by their names in configurations; and dtypes of tensors that are no weights.
_STORED_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NO_WEIGHTS = ("I64", "BOOL", "F64")
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model directory whose headers have been read and checked. `tensors` are by stored name.

    `config` is that of the trained model. If that is the text part of a larger model, `whole` is the skeleton of the larger
    one; else None. `notes` are what a person should know about the files.
    """

    directory: Path
    config: Any = field(repr=False)
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    whole: Any | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def is_coded(self) -> bool:
        """Whether weights are decoded as they are read."""
        return any(tensor.coded is not None for tensor in self.tensors.values())

    @property
    def main_dtype(self) -> str:
        """The dtype of most of the weights.

        Raises:
            ModelError: none are of a dtype that is computed in.
        """
        dtypes = [(_computed(tensor), tensor.num_bytes) for tensor in self.tensors.values()]
        found = {name: sum(size for dtype, size in dtypes if dtype == own) for name, own in _STORED_NAMES.items()}
        if not any(found.values()):
            raise ModelError(
                f"{self.directory}: no tensor is {', '.join(_STORED_NAMES.values())}; weights of other dtypes are not read"
            )
        return max(found, key=lambda name: found[name])

    @classmethod
    def open(cls, directory: str | Path, *, decode: bool = False) -> "Checkpoint":
        """Read the configuration and the headers of the weight files in `directory`.

        With `decode`, coded weights are replaced by the weights for which their codes stand; without it, whoever builds the
        architecture refuses such a model.

        Raises: ModelError: no such directory, no or bad `config.json`, no safetensors weights, or a missing or truncated shard
            or tensor. The message names the file, and the bytes expected and found. Or the configuration says that weights
                are quantised, and none is.
        """
        directory = Path(directory)
        refuse_no_model(directory)
        config = read_config(directory)
        if is_gguf_directory(directory):
            if decode and getattr(config, "quantization_config", None) is not None:
                del config.quantization_config
            return cls(directory, config, gguf_tensors(directory))
        tensors: dict[str, StoredTensor] = {}
        index = _read_index(directory)
        for name in dict.fromkeys(index.values()) if index else [_SINGLE]:
            if not (directory / name).is_file():
                reason = why_unreachable(directory / name).split(";")[0].replace("no such directory", "missing")
                raise ModelError(f"{directory}: weight file {name}, named in {_INDEX}, is {reason}; fetch it again")
            tensors.update(read_header(directory / name))
        missing = sorted(set(index) - set(tensors))
        if missing:
            first = missing[0]
            raise ModelError(
                f"{directory / index[first]}: tensor {first} ({len(missing)} in all) is in {_INDEX}, not in the file; "
                "fetch file and index again, from the same place"
            )
        dtypes = {tensor.dtype for tensor in tensors.values()}
        _refuse_unquantised(directory, config, dtypes)
        notes: tuple[str, ...] = ()
        if decode and (quantised := getattr(config, "quantization_config", None)) is not None:
            tensors = decoded_tensors(directory, config, tensors)
            notes = notes_on_activations(quantised if isinstance(quantised, Mapping) else quantised.to_dict())
            del config.quantization_config
            dtypes = {tensor.dtype for tensor in tensors.values()}
        notes += _notes_on_dtype(config, dtypes)
        config, whole = text_part(config)
        return cls(directory, config, tensors, whole, notes)


def _computed(tensor: StoredTensor) -> str:
    """Return the dtype in which a tensor is computed if nobody says otherwise: codes that stand for float32 have fewer bits."""
    return "BF16" if tensor.coded is not None and tensor.dtype == "F32" else tensor.dtype


def read_config(directory: Path) -> Any:
    """Return the configuration in `directory`.

    Raises:
        ModelError: transformers does not accept it; the message says why.
    """
    read_configuration(directory / "config.json")
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for what a file may hold
        raise ModelError(f"{directory / 'config.json'}: {_refusal(directory, error)}") from error


def _refusal(directory: Path, error: Exception) -> str:
    """Return why transformers does not accept the configuration; the usual reason is said in fewer words than its own."""
    try:
        model_type = parse_json((directory / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        model_type = None
    if isinstance(model_type, str) and model_type not in CONFIG_MAPPING:
        return (
            f"model_type {shortened(repr(model_type), 60)} is unknown to transformers {transformers.__version__}; the "
            "model may need a newer transformers, or code of its own, which is never run"
        )
    return f"transformers does not accept it: {in_one_line(error)}"


def _refuse_unquantised(directory: Path, config: Any, dtypes: Set[str]) -> None:
    """Refuse weights that are not quantised beside a configuration that says they are: an export could not be loaded."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None and dtypes <= {*WEIGHT_DTYPES, *_NO_WEIGHTS}:
        raise ModelError(
            f"{directory / 'config.json'}: its quantization_config names quantised weights ({quantisation_of(config)}), but "
            f"the files hold {', '.join(sorted(dtypes & WEIGHT_DTYPES.keys()))}. If they were converted, remove "
            "quantization_config from config.json; with it, no export could be loaded"
        )


def _notes_on_dtype(config: Any, dtypes: Set[str]) -> tuple[str, ...]:
    """Return a note where the configuration names a dtype that no tensor has: weights are trained and exported as stored."""
    named = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    stored = dtypes & WEIGHT_DTYPES.keys()
    if not named or not stored or _STORED_NAMES.get(named, named) in stored:
        return ()
    return (
        f"config.json says {named}, the weights are {', '.join(sorted(stored))}. Weights are read and exported as that, and "
        f"config.json stays unchanged; a program that loads the model by it gets {named}",
    )


def _read_index(directory: Path) -> dict[str, str]:
    """Return tensor name -> file name; empty for a model in one file, which wins over shards, as in transformers."""
    path = directory / _INDEX
    if (directory / _SINGLE).is_file():
        return {}
    if not path.is_file():
        others = sorted(file.name for file in directory.iterdir() if file.suffix in (".bin", ".pt", ".safetensors", ".gguf"))
        if any(name.endswith(".gguf") for name in others):
            raise ModelError(f"{directory}: holds GGUF; give the file itself, such as {directory / others[0]}")
        raise ModelError(
            f"{directory}: neither {_SINGLE} nor {_INDEX}; found {', '.join(others[:5]) or 'no weight files'}; "
            "save the model with save_pretrained(safe_serialization=True)"
        )
    try:
        mapping = parse_json(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(key): str(value) for key, value in mapping.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: expected a JSON object with a weight_map, found {error!r}") from error
