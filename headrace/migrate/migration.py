"""Reads another trainer's file, finds whose it is, and writes `run.yaml`."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from headrace.files.yaml_options import read_yaml
from headrace.migrate import axolotl, command_line, deepspeed, llama_factory, trl
from headrace.migrate.source import MigratedFile
from headrace.terms.errors import ConfigError
from headrace.terms.options.run_options import RunOptions


@dataclass(frozen=True, slots=True)
class _Tool:
    recognises: Callable[[Mapping[str, Any]], bool]
    translate: Callable[[MigratedFile], None]


# In the order in which a file is looked at: what is most certain comes first.
TOOLS = {each.NAME: _Tool(each.recognises, each.translate) for each in (axolotl, llama_factory, trl, deepspeed)}


@dataclass(frozen=True, slots=True)
class Migration:
    """What became of a file of `tool`.

    `options` are a run's, `origins` the keys that they come from, `left_out` the reasons for other keys. `notes` say what to
    look at.
    """

    tool: str
    options: dict[str, Any]
    origins: dict[str, str]
    left_out: dict[str, str]
    notes: tuple[str, ...]

    def to_yaml(self) -> str:
        """Return the text of `run.yaml`; keys that are required and unknown stand in it as comments."""
        lines = [f"# From a file of {self.tool}. Behind each option stand the keys that it comes from."]
        missing = [each.key for each in RunOptions.declarations() if each.required and each.key not in self.options]
        lines += [f"# {key}:" for key in missing]
        for key, value in self.options.items():
            text = yaml.safe_dump({key: value}, default_flow_style=False, sort_keys=False, allow_unicode=True, width=1000)
            first, *more = text.splitlines()
            lines += [f"{first}  # {self.origins[key]}", *more]
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return all of it for scripts."""
        return asdict(self) | {"notes": list(self.notes)}


def migrate(path: Path, tool: str | None = None) -> Migration:
    """Return what becomes of the file `path` of another trainer; `tool` says which one, if its keys do not.

    Raises:
        ConfigError: it cannot be read, is no tool's, or asks for something that is not trained here.
    """
    if tool not in (None, *TOOLS):
        raise ConfigError(f"from: {tool!r} is no trainer whose files are read; {', '.join(TOOLS)} are")
    name, source = _script(path, tool) if path.suffix in command_line.ENDINGS else _file(path, tool)
    try:
        TOOLS[name].translate(source)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: a value is not of the type that {name} has there ({error})") from error
    order = {key: place for place, key in enumerate(RunOptions.keys())}
    options = dict(sorted(source.options.items(), key=lambda item: order[item[0]]))
    return Migration(name, options, source.origins, source.left_out, tuple(source.notes))


def _file(path: Path, tool: str | None) -> tuple[str, MigratedFile]:
    values = _read(path)
    names = [tool] if tool is not None else [name for name, each in TOOLS.items() if each.recognises(values)]
    if not names:
        raise ConfigError(f"{path}: no keys of {', '.join(TOOLS)} were found; say whose file it is with --from")
    return names[0], MigratedFile(values)


def _script(path: Path, tool: str | None) -> tuple[str, MigratedFile]:
    try:
        name, source = command_line.read_script(path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if tool not in (None, name):
        raise ConfigError(f"{path}: its command is one of {name}, not of {tool}; leave --from out")
    return name, source


def _read(path: Path) -> dict[str, Any]:
    if path.suffix != ".json":
        return read_yaml(path)
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found
