"""Models of the Hugging Face Hub by name: whether the Hub answers, what is to be fetched, and the directory where it then is.

The Hub's own library keeps them below `HF_HOME`, and finds the user's token. A download that stopped goes on (`hub_resume.py`).
Invariant: nobody waits longer than `HUB_SECONDS` to hear that there is no network. Sizes are said before anything is fetched.
"""

import json
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.files.hub_resume import RemoteFile, fetch_missing
from headrace.files.model_directory import absent
from headrace.terms.errors import ModelError, in_one_line
from headrace.terms.sizes import format_bytes

HUB_SECONDS = 2.0
_NAME = re.compile(r"^[\w-][\w.-]*/[\w.-]+$")
_KEPT = re.compile(r"^models--(?P<owner>.+?)--(?P<name>.+)$")
# Weights in other forms, and files of other programs, lie in folders.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*", "USE_POLICY*"]
_CHOSEN: Mapping[str, Any] = {"allow_patterns": _WANTED, "ignore_patterns": ["*/*"]}


def is_name(words: str) -> bool:
    """Return whether `words` are OWNER/NAME."""
    return bool(_NAME.match(words))


def is_hub_name(model: str | Path) -> bool:
    """Return whether `model` looks like OWNER/NAME, and is nothing on this machine."""
    path = Path(model)
    return is_name(str(model)) and not (path.exists() or path.is_symlink())


def hub_name_of(directory: Path) -> str | None:
    """Return the OWNER/NAME of a directory in which the Hub's library keeps a model; None if it is none."""
    found = _KEPT.match(directory.parent.parent.name) if directory.parent.name == "snapshots" else None
    return f"{found['owner']}/{found['name']}" if found else None


def hub_answers(name: str, repo_type: str = "model") -> bool:
    """Return whether the Hub soon says anything about `name`: its own library tries for a minute if nothing answers."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url  # late: most models are local
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    answered: list[bool] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json", repo_type=repo_type), timeout=HUB_SECONDS)
            answered.append(True)
        except OfflineModeIsEnabled:
            answered.append(False)
        except HfHubHTTPError as error:  # no such file, no access: that is an answer, which the download will put into words
            answered.append(error.response is not None)
        except Exception:  # whatever the libraries below raise without a network
            answered.append(False)

    asking = threading.Thread(target=ask, daemon=True)  # names are looked up without a time limit
    asking.start()
    asking.join(HUB_SECONDS)
    return bool(answered and answered[0])


def refuse_unanswered(name: str) -> Path | None:
    """Return the whole copy of a model where the Hub does not answer; None where it does.

    Raises:
        ModelError: it does not answer, and there is no whole copy.
    """
    if hub_answers(name):
        return None
    if (kept := _whole_copy(name)) is not None:
        return kept
    raise absent(name, f" here, the Hub did not answer within {HUB_SECONDS:g} seconds, and there is no whole copy")


def fetched_model(name: str, say: Callable[[str], None]) -> Path:
    """Return the directory of the Hub's model `name`, fetched if it is not there. `say` is told what will be fetched.

    Without a network, a copy that is whole is taken as it is.

    Raises:
        ModelError: the Hub does not answer and there is no whole copy, has no such model, refuses it, or space is missing.
    """
    from huggingface_hub import model_info, snapshot_download

    if (kept := refuse_unanswered(name)) is not None:
        return kept
    try:
        model_info(name)  # a model that is refused is named by its error
        files = snapshot_download(name, dry_run=True, **_CHOSEN)
        if not any(file.filename.endswith(".safetensors") for file in files):
            raise ModelError(f"model: {name} on the Hub has no safetensors files; choose a model that has")
        wanted = [file for file in files if file.will_download]
        large = list(filter(None, (_large(name, file) for file in wanted)))
        there = sum(file.size_bytes - file.missing_bytes for file in large)
        missing = sum(file.file_size for file in wanted) - there
        _refuse_no_space(name, missing)
        if missing:
            whole = sum(file.file_size for file in files)
            say(f"{name}: fetching {format_bytes(missing)} of {format_bytes(whole)} into {_cache()}")
        fetch_missing(large)
        return Path(snapshot_download(name, **_CHOSEN))
    except ModelError:
        raise
    except Exception as error:  # no such model, no access, a lost connection: the Hub's library has an error for each
        advice = "Check the name; for a model that asks for access, log in with `hf auth login`"
        if type(error).__name__ not in ("RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"):
            advice = "The same command goes on where it stopped"
        raise ModelError(
            f"model: {name} could not be fetched from the Hub ({type(error).__name__}: {in_one_line(error)}). {advice}"
        ) from error


def _large(name: str, file: Any) -> RemoteFile | None:
    """Return a file of weights; the library fetches the others."""
    weights = file.filename.endswith(".safetensors")
    return RemoteFile.of(name, file.filename, file.commit_hash, _cache()) if weights else None


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _refuse_no_space(name: str, needed: int) -> None:
    there = next(path for path in (_cache(), *_cache().parents) if path.exists())
    if (free := shutil.disk_usage(there).free) < needed:
        raise ModelError(
            f"model: {name} needs {format_bytes(needed)} in {_cache()}, free are {format_bytes(free)}; make room, or choose "
            "another directory with HF_HOME"
        )


def _whole_copy(name: str) -> Path | None:
    """Return the copy of a model that has all files of weights that its index names; None if there is none."""
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(name, local_files_only=True, **_CHOSEN))
        names = {"model.safetensors"}
        if (index := directory / "model.safetensors.index.json").exists():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except Exception:  # nothing was fetched, or an index is damaged
        return None
    return directory if all((directory / each).exists() for each in (*names, "config.json")) else None
