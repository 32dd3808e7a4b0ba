"""Machine profiles by name or from a file.

`machines/<gpu>.json` describes one GPU in a typical host and the drive that goes with it, each figure beside its source.
`<gpu>-<n>ssd` is that machine with `n` such drives. A file is what `headrace bench machine` writes: `Ceilings.to_json`.
Invariant: whatever comes from here has passed the checks of `Ceilings.from_json`.
"""

import re
from dataclasses import replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from headrace.codec.table import CODES
from headrace.terms.errors import ConfigError
from headrace.terms.figures import refuse_unknown
from headrace.terms.json_text import parse_json
from headrace.terms.machine.ceilings import Ceilings

# The numbers of SSDs that are listed; any number up to the limit is understood.
DRIVE_COUNTS = (1, 4, 12)
_MOST_DRIVES = 24
_NAME = re.compile(r"^(?P<base>.+)-(?P<drives>[0-9]{1,3})ssd$")


def profile_names() -> tuple[str, ...]:
    """Return the names of the profiles that come with the package."""
    return tuple(f"{base}-{drives}ssd" for base in sorted(_bases()) for drives in DRIVE_COUNTS)


def load_profile(name_or_path: str | Path) -> Ceilings:
    """Return the profile that comes with the package under this name, or the one in this JSON file.

    A `Path`, a text that ends in `.json`, or one with a `/` is a file; anything else is a name.

    Raises:
        ConfigError: there is no such name (the message lists all) or file, it is not JSON, or a figure is missing or absurd.
    """
    if isinstance(name_or_path, Path) or name_or_path.endswith(".json") or "/" in name_or_path:
        return _load_file(Path(name_or_path))
    match = _NAME.match(name_or_path)
    base = _bases().get(match["base"]) if match else None
    if match is None or base is None or not 1 <= int(match["drives"]) <= _MOST_DRIVES:
        raise ConfigError(
            f"machine {name_or_path!r}: no profile of this name. The names are {', '.join(profile_names())} (any number of "
            f"SSDs from 1 to {_MOST_DRIVES}); or give the path of a JSON file made by 'headrace bench machine'"
        )
    return _compose(_parse(base.read_bytes(), where=base.name), name=name_or_path, num_drives=int(match["drives"]))


def load_bare_profile(name_or_path: str) -> Ceilings:
    """Return the profile as `load_profile` does. A name that says nothing of SSDs stands for that machine with one: for
    machines whose SSDs are counted elsewhere or not at all.

    Raises:
        ConfigError: as `load_profile`.
    """
    if name_or_path in _bases():
        return replace(load_profile(f"{name_or_path}-1ssd"), name=name_or_path)
    return load_profile(name_or_path)


def _bases() -> dict[str, Traversable]:
    """Return the packaged files by the name of their GPU."""
    folder = files("headrace.plan") / "machines"
    return {entry.name.removesuffix(".json"): entry for entry in folder.iterdir() if entry.name.endswith(".json")}


def _load_file(path: Path) -> Ceilings:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"machine profile {path}: cannot be read ({error.strerror}); "
            f"make one with 'headrace bench machine' or use a name: {', '.join(profile_names())}"
        ) from error
    ceilings = Ceilings.from_json(_parse(content, where=str(path)))
    kinds = {code.kind for code in CODES.values()}
    refuse_unknown(ceilings.decoded_per_second, kinds, where=f"{ceilings.name}: decoded_per_second")
    return ceilings


def _parse(content: bytes, *, where: str) -> Any:
    try:
        return parse_json(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"machine profile {where}: not JSON ({error}); make one with 'headrace bench machine'") from error


def _compose(base: dict[str, Any], *, name: str, num_drives: int) -> Ceilings:
    """Return the machine of a packaged file with `num_drives` of its drives."""
    figures, drive = base["figures"], base["drive"]
    sources = {field: figure["source"] for field, figure in figures.items()}
    sources |= {f"drives.{field}": f"{drive['title']}: {figure['source']}" for field, figure in drive["figures"].items()}
    return Ceilings.from_json(
        {
            "name": name,
            "has_device": base["has_device"],
            **{field: figure["value"] for field, figure in figures.items()},
            "drives": [{field: figure["value"] for field, figure in drive["figures"].items()}] * num_drives,
            "sources": sources,
        }
    )
