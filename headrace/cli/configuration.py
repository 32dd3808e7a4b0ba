"""The configuration of a run: `RUN.YAML | MODEL DATA...`, `key=value` words and options. Reading it needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headrace.cli.first_look import split_words
from headrace.files.yaml_options import parse_changes, read_yaml
from headrace.process import cache_directory, machine_profile_path
from headrace.terms.errors import ConfigError
from headrace.terms.options.plan_options import PlanOptions
from headrace.terms.options.run_options import NodeOptions, RunOptions

OPTIONS = "options"
_Config = TypeVar("_Config", bound=RunOptions)


def config_of(words: Sequence[str], options: Mapping[str, Any], kind: type[_Config]) -> _Config:
    """Return the configuration, of class `kind`, of `RUN.YAML | MODEL DATA...`, `key=value` words and options.

    Raises:
        ConfigError: the words are neither, or see `RunOptions.of`.
    """
    found, source = _values_of(words)
    if "model" in found and "data" not in found and source == OPTIONS:
        raise ConfigError(f"found only {found['model']!r}; give a RUN.YAML, or a MODEL directory and one or more DATA files")
    values: dict[str, Any] = {"cache": cache_directory()}
    if machine_profile_path().exists():
        values["machine"] = str(machine_profile_path())
    return kind.of(values | found | dict(options), source=source)


def plan_options_of(
    words: Sequence[str], data: Sequence[str], options: Mapping[str, Any]
) -> tuple[PlanOptions, frozenset[str]]:
    """Return what `headrace plan` is asked by `RUN.YAML | MODEL [DATA...]`, `key=value` words and options, and the keys given.

    A node's file may be planned, too: keys that only a node has say nothing about a plan, but are checked.

    Raises:
        ConfigError: there is no model, or see `PlanOptions.of`.
    """
    found, source = _values_of(words)
    found |= {**({"data": tuple(data)} if data else {}), **options}
    if not found.get("model"):
        raise ConfigError(f"{source}: model is missing; give a RUN.YAML that has it, or a MODEL")
    own = {key: value for key, value in found.items() if key not in NodeOptions.keys() or key in PlanOptions.keys()}  # noqa: SIM118
    at_node = {key: value for key, value in found.items() if key not in own}
    NodeOptions.of({"model": found["model"], "data": ("-",)} | at_node, source=source)
    return PlanOptions.of({"cache": cache_directory()} | own, source=source), frozenset(found) - {"model"}


def _values_of(words: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return what the words say, and where it stands for errors."""
    places, changed = split_words(words)
    changes = parse_changes(changed)
    if len(places) == 1 and Path(places[0]).suffix in (".yaml", ".yml"):
        return read_yaml(Path(places[0])) | changes, places[0]
    named: dict[str, Any] = {"model": places[0]} if places else {}
    if len(places) > 1:
        named["data"] = places[1:]
    return named | changes, OPTIONS
