"""What is wrong with a model directory, in words for the person who downloaded it. Nothing is loaded to tell.

Invariant: nothing is refused here that could be read: these are reasons for what is missing.
"""

import errno
import json
import os
import re
from pathlib import Path

from headrace.terms.errors import ModelError

_LFS = b"version https://git-lfs"
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
        raise ModelError(f"model: {model} is no directory and no file; give a model directory, a config.json, or OWNER/NAME")


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
    if (directory / "adapter_config.json").is_file():
        base = _base_of(directory)
        return f"holds an adapter (LoRA) and no model{base}; merge it into that (merge_and_unload), and give the result"
    return f"has no config.json{_or(why_unreachable(config))}: no Hugging Face model directory"


def why_unreachable(path: Path) -> str:
    """Return what the system says of a path that cannot be reached, such as symbolic links in a circle; "" if it can."""
    try:
        os.stat(path)
    except FileNotFoundError:
        broken = " (a symbolic link to what is not there)" if path.is_symlink() else ""
        return f"no such directory{broken}; give a local model directory, nothing is downloaded"
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


def _base_of(directory: Path) -> str:
    try:
        base = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    return f": it belongs to {base}" if base else ""


def _or(reason: str) -> str:
    return f" ({reason.split(';')[0]})" if reason.startswith("cannot") else ""
