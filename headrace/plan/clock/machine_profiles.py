"""Machine profiles by name or from a file.

`machines/<gpu>.json` describes one GPU in a typical host and the drive that goes with it, each figure beside its source.
`<gpu>-<n>ssd` is that machine with `n` such drives, `<gpu>` with one. A file is what `headrace bench machine` writes.
Invariant: whatever comes from here has passed the checks of `Ceilings.from_json`.
"""

import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from headrace.codec.table import CODES
from headrace.terms.errors import ConfigError
from headrace.terms.figures import refuse_unknown
from headrace.terms.json_text import parse_json
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.plan_options import MACHINE_CHANGES
from headrace.terms.sizes import format_bytes

_MOST_DRIVES = 24
_NAME = re.compile(r"^(?P<base>.+?)(-(?P<drives>[0-9]{1,3})ssd)?$")
_TERABYTE = 1e12
_LEAST_RATE = 1e7


def profile_names() -> tuple[str, ...]:
    """Return the names of the profiles that come with the package."""
    return tuple(sorted(_bases()))


def load_profile(name_or_path: str | Path) -> Ceilings:
    """Return the profile that comes with the package under this name, or the one in this JSON file.

    A `Path`, a text that ends in `.json`, or one with a `/` is a file; anything else is a name. A name without a number of
    SSDs has one.

    Raises:
        ConfigError: there is no such name (the message lists all) or file, it is not JSON, or a figure is missing or absurd.
    """
    if isinstance(name_or_path, Path) or name_or_path.endswith(".json") or "/" in name_or_path:
        return _load_file(Path(name_or_path))
    match = _NAME.match(name_or_path)
    base = _bases().get(match["base"]) if match else None
    drives = int(match["drives"] or 1) if match else 0
    if base is None or not 1 <= drives <= _MOST_DRIVES:
        raise ConfigError(
            f"machine {name_or_path!r}: no profile of this name. The names are {', '.join(profile_names())} (-2ssd to "
            f"-{_MOST_DRIVES}ssd behind one: more of its SSDs); or give the path of a file of 'headrace bench machine'"
        )
    return _compose(_parse(base.read_bytes(), where=base.name), name=name_or_path, num_drives=drives)


def with_changes(machine: Ceilings, given: Mapping[str, float]) -> Ceilings:
    """Return `machine` with the figures of `given`: some of `MACHINE_CHANGES`, rates in bytes a second, writable bytes in TB.

    The update's rate grows with memory's, a CPU's products with its cores. A drive's rate of both directions grows with theirs.

    Raises:
        ConfigError: the machine that this makes cannot be.
    """
    for key in given:
        if key.endswith("rate") and given[key] < _LEAST_RATE:
            raise ConfigError(
                f"{key}: {given[key]:g} bytes a second given, no such part is below 10 MB/s; write it as 7GB or 500MB"
            )
    values = machine.to_json()
    cores, memory = given.get("cores", machine.cores), machine.host_memory_bytes_per_second
    rate = given.get("ram_rate", memory)
    values |= {"cores": cores, "host_memory_bytes": given.get("ram", machine.host_memory_bytes)}
    values["host_memory_bytes_per_second"] = rate
    for name in ("update_bytes_per_second", "update_bytes_per_second_per_core"):
        values[name] *= rate / memory
    if not machine.has_device:
        values["flops_per_second"] = {dtype: each * cores / machine.cores for dtype, each in machine.flops_per_second.items()}
    for drive in values["drives"]:
        before = drive["read_bytes_per_second"] + drive["write_bytes_per_second"]
        drive["read_bytes_per_second"] = given.get("ssd_rate", drive["read_bytes_per_second"])
        drive["write_bytes_per_second"] = given.get("ssd_write_rate", drive["write_bytes_per_second"])
        drive["mixed_bytes_per_second"] *= (drive["read_bytes_per_second"] + drive["write_bytes_per_second"]) / before
        if "ssd_tbw" in given:
            drive["rated_endurance_bytes"] = given["ssd_tbw"] * _TERABYTE
    words = ", ".join(f"{key.replace('_', '-')} {_in_words(key, given[key])}" for key in MACHINE_CHANGES if key in given)
    return Ceilings.from_json(values | {"name": f"{machine.name} with {words}"})


def _in_words(key: str, figure: float) -> str:
    if key.endswith("rate"):
        return f"{figure / 1e9:g} GB/s"
    return format_bytes(int(figure)) if key == "ram" else f"{figure:g}{' TB' if key == 'ssd_tbw' else ''}"


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
