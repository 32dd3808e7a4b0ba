"""The configuration of a run: `RUN.YAML | MODEL DATA...`, `key=value` words and options. Reading it needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headrace.cli.environment import cache_directory, machine_profile_path
from headrace.cli.first_look import split_words
from headrace.files.yaml_options import parse_changes, read_yaml
from headrace.terms.errors import ConfigError
from headrace.terms.run_options import RunOptions

_Config = TypeVar("_Config", bound=RunOptions)


def config_of(words: Sequence[str], options: Mapping[str, Any], kind: type[_Config]) -> _Config:
    """Return the configuration, of class `kind`, of `RUN.YAML | MODEL DATA...`, `key=value` words and options.

    Raises:
        ConfigError: the words are neither, or see `RunOptions.of`.
    """
    places, changed = split_words(words)
    changes = parse_changes(changed)
    values: dict[str, Any] = {"cache": cache_directory()}
    if machine_profile_path().exists():
        values["machine"] = str(machine_profile_path())
    source = "options"
    if len(places) == 1 and Path(places[0]).suffix in (".yaml", ".yml"):
        source = places[0]
        values |= read_yaml(Path(source))
    elif len(places) >= 2:
        values |= {"model": places[0], "data": places[1:]}
    elif len(places) == 1:
        raise ConfigError(f"found only {places[0]!r}; give a RUN.YAML, or a MODEL directory and one or more DATA files")
    return kind.of(values | changes | dict(options), source=source)
