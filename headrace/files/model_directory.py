"""What is wrong with a model directory, in words for the person who downloaded it. Nothing is loaded to tell.

Invariant: nothing is refused here that could be read: these are reasons for what is missing.
"""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.terms.errors import ModelError
from headrace.terms.json_text import parse_json

CHAT_TEMPLATE_NAME, GENERATION_CONFIG = "chat_template.jinja", "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
GGUF_TABLE = "gguf.table"  # where the tensors of a GGUF file lie; no file that is copied beside trained weights
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_WEIGHTS = tuple(f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json"))
_LFS = b"version https://git-lfs"
# What is built one by one before anybody could tell whether the weights are there. No model has nearly so many.
_MAX_COUNTS = ((re.compile(r"\w*(layers?|blocks|depth|codebooks)"), 2048), (re.compile(r"\w*experts"), 1 << 16))
_GIVE = "give a model directory, a GGUF file, or OWNER/NAME of the Hub"
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")


def refuse_no_model(directory: Path) -> None:
    """Refuse what is no model directory.

    Raises:
        ModelError: it is not there, or has no configuration.
    """
    if reason := why_no_model(directory):
        raise ModelError(f"model: {directory}: {reason}")


def refuse_no_configuration(model: str) -> None:
    """Refuse what names no configuration: neither a model directory, nor a file, nor OWNER/NAME of the Hub.

    Raises:
        ModelError: it is none of these.
    """
    path = Path(model)
    if path.is_dir() or path.is_symlink():
        refuse_no_model(path)
    elif not path.is_file() and (not _HUB_ID.match(model) or path.suffix == ".json"):
        raise absent(model)


def read_configuration(path: Path) -> dict[str, Any]:
    """Return the values of a config.json.

    Raises:
        ModelError: it cannot be read, is no JSON object, or asks for more layers or experts than any model has.
    """
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); give a Hugging Face model directory") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error}); fetch the file again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object, found a {type(values).__name__}; fetch the file again")
    for key, count in _counts(values):
        for names, most in _MAX_COUNTS:
            if names.fullmatch(key) and count > most:
                raise ModelError(f"{path}: {key} is {count!s:.20}; at most {most} can be: fetch the file again")
    return values


def _counts(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers within a value, each with the last key on the way to it."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else ((key, each) for each in value):
            yield from _counts(inner, name)
    elif isinstance(value, int | float):
        yield key, value


def why_no_model(directory: Path) -> str:
    """Return why `directory` is no model directory, and what to do; "" if it is a directory with a configuration."""
    if reason := why_unreachable(directory):
        return reason
    if not directory.is_dir():
        return "is a file; give the directory that it is in"
    config = directory / "config.json"
    if config.is_file():
        pointer = "holds a git-lfs pointer instead of config.json; fetch the files with `git lfs pull`"
        return pointer if is_lfs_pointer(config) else ""
    if (directory / ADAPTER_CONFIG).is_file():
        base = _base_of(directory)
        of = f": it belongs to {base}" if base else ""
        return f"holds an adapter (LoRA) and no model{of}; merge it into that (merge_and_unload), and give the result"
    return f"has no config.json{_or(why_unreachable(config))}: no Hugging Face model directory"


def why_unreachable(path: Path) -> str:
    """Return what the system says of a path that cannot be reached, such as symbolic links in a circle; "" if it can."""
    try:
        os.stat(path)
    except FileNotFoundError:
        broken = " (a symbolic link to what is not there)" if path.is_symlink() else ""
        return f"no such directory{broken}; {_GIVE}"
    except OSError as error:
        advice = "look at where its symbolic links lead" if error.errno == errno.ELOOP else "give a local model directory"
        return f"cannot be reached: {error.strerror or error}; {advice}"
    return ""


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is what git-lfs leaves in place of one that was not fetched."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS)) == _LFS
    except OSError:
        return False


def absent(model: str, why: str = "") -> ModelError:
    """Return the error for a model that is not there; `why` not elsewhere, either."""
    return ModelError(f"model: {model}: no such directory{why}; {_GIVE}")


def has_adapter(directory: Path) -> bool:
    """Return whether a directory has an adapter's configuration and its weights, whatever else is there."""
    return (directory / ADAPTER_CONFIG).is_file() and any((directory / name).exists() for name in _ADAPTERS)


def is_whole_model(directory: Path) -> bool:
    """Return whether a directory has the configuration of a model and its weights, whatever else is there."""
    return (directory / "config.json").is_file() and any((directory / name).exists() for name in (*_WEIGHTS, GGUF_TABLE))


def is_adapter_directory(directory: Path) -> bool:
    """Return whether a directory has adapters as PEFT writes them, and no model's weights."""
    return (directory / ADAPTER_CONFIG).is_file() and not is_whole_model(directory)


def has_weights(model: str | Path) -> bool:
    """Return whether `model` is a directory with weight files, whole or not, or of a GGUF file."""
    endings = (GGUF_TABLE, ".safetensors", ".gguf", ".bin", ".pt", ".index.json")
    return Path(model).is_dir() and any(file.name.endswith(endings) for file in Path(model).iterdir())


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory has the files of a tokenizer."""
    return any((directory / name).exists() for name in TOKENIZER_FILES)


def has_vocabulary(directory: Path) -> bool:
    """Return whether a directory has a tokenizer with its words, not its configuration alone."""
    return any((directory / name).exists() for name in TOKENIZER_FILES if not name.endswith("config.json"))


def template_in(directory: Path) -> Path | None:
    """Return the file in a directory that has a chat template: its own, or the tokenizer's configuration; or None."""
    if (own := directory / CHAT_TEMPLATE_NAME).is_file():
        return own
    path = directory / "tokenizer_config.json"
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
        return path if isinstance(values["chat_template"], str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def named_base(directory: Path) -> Path:
    """Return the model directory of which adapters say that they were trained on it.

    Raises:
        ModelError: it is not there, or they name none.
    """
    base = _base_of(directory)
    if base and (Path(base) / "config.json").is_file():
        return Path(base)
    why = why_no_model(Path(base)).split(";")[0] if base else f"{ADAPTER_CONFIG} names no model"
    raise ModelError(f"{directory}: an adapter of {base!r}: {why}. Give the model, and --adapter {directory}")


def _base_of(directory: Path) -> str | None:
    try:
        base = parse_json((directory / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    return base if isinstance(base, str) and base else None


def _or(reason: str) -> str:
    return f" ({reason.split(';')[0]})" if reason.startswith("cannot") else ""
