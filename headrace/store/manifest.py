"""The manifest of a store, `state.json`: all that must be known to find every byte again. Written once.

Invariant: when the manifest exists, every file that it names exists at full size.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.files.durable import sync, write_whole
from headrace.terms.cuts import Cuts
from headrace.terms.errors import RunDirectoryError, unwritten
from headrace.terms.families import Durability, Family, Unit
from headrace.terms.json_text import UNSOUND, parse_json
from headrace.terms.layout import SCALE, GroupRange, ParameterSpec, Plane, UnitLayout

MANIFEST_FORMAT = 2
MANIFEST_NAME = "state.json"
# The manifest of a run that is being made or removed.
UNMADE_NAME = MANIFEST_NAME + ".new"
RECORD_NAMES = ("commit.0", "commit.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a store was created with. `identity` is the caller's: model, data, options."""

    run_id: str
    units: tuple[Unit, ...]
    scratch_bytes: int
    stripe_bytes: int
    weights: tuple[int, ...]
    directories: tuple[Path, ...]
    identity: Mapping[str, Any]

    @property
    def layouts(self) -> tuple[UnitLayout, ...]:
        """Where the parameters of each unit lie in its weights."""
        return tuple(unit.weights.layout for unit in self.units)

    @property
    def chunk_elements(self) -> int:
        """Elements of the longest chunk of what is updated."""
        families = [family for unit in self.units for family in unit.families if family.durability is Durability.TWO_SLOTS]
        chunks = [chunk for family in families for chunk in family.chunks]
        return max((stop - start for start, stop in chunks), default=0)

    def data_paths(self) -> tuple[Path, ...]:
        """Return the data file in each directory."""
        return tuple(data_folder(directory, self.run_id) / "data" for directory in self.directories)


def data_folder(directory: Path, run_id: str) -> Path:
    """Return the folder of run `run_id` inside an SSD directory."""
    return directory / f"headrace-{run_id}"


def announce_manifest(run_directory: Path, manifest: Manifest) -> None:
    """Write what `write_manifest` will make valid. Found alone, it shows that its run was never complete.

    Directories inside the run directory are named from there, so that they go along where it is moved or copied.

    Raises:
        StorageError, DiskFull: it cannot be written.
    """
    here = run_directory.resolve()
    directories = [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in manifest.directories]
    values = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    fields = {"format": MANIFEST_FORMAT, **values, "units": _described(manifest.units), "directories": directories}
    text = json.dumps(fields, indent=1)
    with _refused(run_directory / UNMADE_NAME, "written", "repeat the command: no run was begun"):
        write_whole(run_directory / UNMADE_NAME, text)


def write_manifest(run_directory: Path) -> None:
    """Make what was announced `state.json`, so that it is there as a whole or not at all, and survives a power cut.

    Raises:
        StorageError, DiskFull: it cannot be written.
    """
    with _refused(run_directory / MANIFEST_NAME, "written", "repeat the command: no run was begun"):
        (run_directory / UNMADE_NAME).rename(run_directory / MANIFEST_NAME)
        sync(run_directory)


def withdraw_manifest(run_directory: Path) -> None:
    """Undo `write_manifest`: from now on the run is one that is not whole.

    Raises:
        StorageError, DiskFull: it cannot be renamed.
    """
    with _refused(run_directory / MANIFEST_NAME, "renamed", "repeat the command: nothing was removed"):
        with contextlib.suppress(FileNotFoundError):
            (run_directory / MANIFEST_NAME).rename(run_directory / UNMADE_NAME)
        sync(run_directory)


def remove_records(run_directory: Path, *more: str) -> None:
    """Remove what is left in `run_directory` of a run whose manifest is withdrawn, when its last folder is gone.

    Raises:
        StorageError: a file cannot be removed.
    """
    for name in (*RECORD_NAMES, UNMADE_NAME, *more):
        with _refused(run_directory / name, "removed", "remove it: the state itself is gone"):
            (run_directory / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _refused(path: Path, verb: str, advice: str) -> Iterator[None]:
    """Say what the system's refusal to write, rename or remove `path` means."""
    try:
        yield
    except OSError as error:
        raise unwritten(path, error, advice, verb=verb) from error


def read_manifest(run_directory: Path, name: str = MANIFEST_NAME) -> Manifest:
    """Read `state.json` of `run_directory`, or the file `name` there that was announced as such.

    Raises:
        RunDirectoryError: there is none, it is damaged, or another version wrote it.
    """
    path = run_directory / name
    try:
        fields = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunDirectoryError(
            f"{run_directory}: no run of Headrace, {MANIFEST_NAME} is missing; name a run directory"
        ) from None
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path}: cannot be read as JSON: {error}; restore the file") from error
    found_format = fields.get("format") if isinstance(fields, dict) else None
    if found_format != MANIFEST_FORMAT:
        raise RunDirectoryError(
            f"{path}: format {found_format!r}, this version reads format {MANIFEST_FORMAT}; use the version that wrote it"
        )
    try:
        return _parse(fields, run_directory.resolve())
    except UNSOUND as error:
        raise RunDirectoryError(f"{path}: damaged, {type(error).__name__}: {error}; restore the file") from error


def _parse(fields: dict[str, Any], run_directory: Path) -> Manifest:
    return Manifest(
        run_id=fields["run_id"],
        units=_parse_units(fields["units"]),
        scratch_bytes=fields["scratch_bytes"],
        stripe_bytes=fields["stripe_bytes"],
        weights=tuple(fields["weights"]),
        directories=tuple(run_directory / text for text in fields["directories"]),
        identity=fields["identity"],
    )


def _described(units: Sequence[Unit]) -> dict[str, Any]:
    """Return `units` as JSON values. A layout that families share is written once: a large model has thousands of names."""
    layouts: dict[UnitLayout, int] = {}
    described = [
        {
            "name": unit.name,
            "families": [
                {
                    "name": family.name,
                    "layout": layouts.setdefault(family.layout, len(layouts)),
                    "borders": family.borders,
                    "planes": [asdict(plane) for plane in family.planes],
                    "durability": family.durability,
                    **({"cuts": family.cuts} if family.cuts else {}),
                    **({"held": family.held} if family.held is not None else {}),
                }
                for family in unit.families
            ],
        }
        for unit in units
    ]
    return {"layouts": [asdict(layout) for layout in layouts], "units": described}


def _parse_units(fields: dict[str, Any]) -> tuple[Unit, ...]:
    layouts = [_parse_layout(layout) for layout in fields["layouts"]]

    def family(values: dict[str, Any]) -> Family:
        return Family(
            name=values["name"],
            layout=layouts[values["layout"]],
            borders=tuple(values["borders"]),
            planes=tuple(Plane(**plane) for plane in values["planes"]),
            durability=Durability(values["durability"]),
            cuts=tuple(Cuts(*each) for each in values.get("cuts", ())),
            held=tuple(values["held"]) if "held" in values else None,
        )

    return tuple(Unit(unit["name"], tuple(map(family, unit["families"]))) for unit in fields["units"])


def _parse_parameter(fields: dict[str, Any]) -> ParameterSpec:
    # Before kinds were recorded, names decided: what had "norm" in its name was taken for one.
    named = SCALE if len(fields["shape"]) > 1 and "norm" in fields["name"].lower() else ""
    return ParameterSpec(**{"kind": named, **fields, "shape": tuple(fields["shape"])})


def _parse_layout(fields: dict[str, Any]) -> UnitLayout:
    parameters = tuple(map(_parse_parameter, fields["parameters"]))
    groups = tuple(GroupRange(**group) for group in fields["groups"])
    return UnitLayout(fields["name"], parameters, groups, fields["num_elements"])
