"""One entry of `data`: where samples are, which of them, how often, and under which names.

Invariant: an entry that says nothing but where the samples are is its path alone, as text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os.path import expanduser
from pathlib import Path
from typing import Any, ClassVar

from headrace.terms.errors import ConfigError
from headrace.terms.options.option_kinds import Flag, Number, OptionKind, PlaceOrName, Schema, shown

DEFAULT_SPLIT = "train"
# What stands for the path of data that a program gave.
OF_PROGRAM = "program:"
_KEYS = ("path", "name", "split", "weight", "columns", "streaming")


@dataclass(frozen=True, slots=True)
class DataSource:
    """A file, a directory or a Hub data set (`owner/name`), and what is taken of it.

    `name` is a configuration of a Hub data set, `split` one of its splits. `weight` says how often each sample occurs in an
    epoch. `columns` gives the data's own name of a column for each name of ours. With `streaming` rows are read as they come.
    """

    path: str
    name: str | None = None
    split: str = DEFAULT_SPLIT
    weight: float = 1.0
    columns: Mapping[str, str] = field(default_factory=dict)
    streaming: bool = False

    def __str__(self) -> str:
        parts = (self.path, self.name, self.split if self.split != DEFAULT_SPLIT else None)
        return ":".join(part for part in parts if part)

    @property
    def names_part(self) -> bool:
        """Whether it names a configuration or a split, which a file has not."""
        return self.name is not None or self.split != DEFAULT_SPLIT

    def to_json(self) -> dict[str, Any]:
        """Return the entry as it stands in a file."""
        usual = DataSource("")
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {key: value for key, value in values.items() if value != getattr(usual, key)}


def source_of(entry: str | DataSource) -> DataSource:
    """Return an entry of `data` with all of its fields."""
    return entry if isinstance(entry, DataSource) else DataSource(str(entry))


@dataclass(frozen=True)
class SourceKind(OptionKind):
    """A path or a name, or a mapping of `path`, `name`, `split`, `weight`, `columns` and `streaming`."""

    takes_mapping: ClassVar[bool] = True

    def read(self, value: Any, key: str) -> str | DataSource:
        """Return the entry: text where it is a path alone."""
        if isinstance(value, DataSource):
            value = value.to_json()
        if not isinstance(value, Mapping):
            return PlaceOrName().read(value, key)
        unknown = [name for name in value if name not in _KEYS]
        if unknown or not isinstance(value.get("path"), str | Path):
            what = f"unknown key {unknown[0]!r}" if unknown else "path is missing"
            raise ConfigError(f"{key}: {what}; an entry is a path, or a mapping with {', '.join(_KEYS)}")
        entry = DataSource(
            path=expanduser(str(value["path"])),
            name=_text(value.get("name"), f"{key}.name"),
            split=_text(value.get("split"), f"{key}.split") or DEFAULT_SPLIT,
            weight=Number(0, 1e6, above=True).read(1.0 if value.get("weight") is None else value["weight"], f"{key}.weight"),
            columns=_columns(value.get("columns") or {}, f"{key}.columns"),
            streaming=Flag().read(value.get("streaming") or False, f"{key}.streaming"),
        )
        return entry if entry != DataSource(entry.path) else entry.path

    def schema(self) -> Schema:
        """Return the JSON schema."""
        keys = {
            **{name: {"type": "string"} for name in ("path", "name", "split")},
            "weight": Number(0, 1e6, above=True).schema(),
            "columns": {"type": "object", "additionalProperties": {"type": "string"}},
        }
        entry = {"type": "object", "properties": keys, "required": ["path"], "additionalProperties": False}
        return {"anyOf": [{"type": "string"}, entry]}


def _text(value: Any, key: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{key}: expected a text, found {shown(value)}")
    return value


def _columns(value: Any, key: str) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(each, str) and each for pair in value.items() for each in pair):
        raise ConfigError(f"{key}: expected names such as {{messages: conversation}}, ours first, found {shown(value)}")
    twice = [name for name in value.values() if list(value.values()).count(name) > 1]
    if twice:
        raise ConfigError(f"{key}: {twice[0]!r} stands for two columns; name it once")
    return dict(value)
