"""`RunOptions` as YAML: to a file and back, and `key=value` words.

Invariant: text that is not YAML, or has a key twice, is refused in one line that names the place.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from headrace.terms.errors import ConfigError
from headrace.terms.options.option_kinds import shown
from headrace.terms.options.run_options import NodeOptions, RunOptions


def from_yaml(path: Path, changes: Mapping[str, Any] | None = None) -> RunOptions:
    """Return the options in the YAML file `path`; if it says where to listen, a node's. Keys of `changes` win over the file's.

    Raises:
        ConfigError: there is no such file, it is no YAML mapping, or see `RunOptions.of`.
    """
    values = read_yaml(path) | dict(changes or {})
    return (NodeOptions if "listen" in values else RunOptions).of(values, source=str(path))


def to_yaml(options: RunOptions) -> str:
    """Return all keys as YAML that `from_yaml` reads back to equal options."""
    return yaml.safe_dump(options.to_json(), sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in the YAML file `path`; an empty file is an empty mapping.

    Raises:
        ConfigError: there is no such file, it is no YAML mapping, or a key stands twice in one mapping.
    """
    try:
        values = _loaded(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the path of a YAML file with the run's options"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, found a {type(values).__name__}")
    return values or {}


def parse_changes(words: Sequence[str]) -> dict[str, Any]:
    """Return `key=value` words as a mapping; values are read as YAML, so `ssd=[/a,/b]` is a list.

    Raises:
        ConfigError: a word has no `=`, or a value is not YAML or has a key twice.
    """
    changes: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{shown(word)}: expected key=value, such as learning_rate=2e-5")
        try:
            changes[key.replace("-", "_")] = _loaded(value)
        except ValueError as error:
            raise ConfigError(f"{shown(word)}: {error}") from error
    return changes


class _OnceLoader(yaml.SafeLoader):
    """YAML's own loader would silently take the last of several values of one key, and 1:4 for 64 (to base 60)."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Return the mapping's node. Here it is as written; later, what `<<` merges into it looks like keys of its own.

        Raises:
            ConfigError: a key stands twice.
        """
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # the constructor refuses it
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                where = f"in lines {lines[name]} and {line}" if lines[name] != line else f"in line {line}"
                raise ConfigError(f"{shown(key.value)} stands twice, {where}; keep one of them")
            lines[name] = line
        return node


_OnceLoader.yaml_implicit_resolvers = {
    first: [("tag:yaml.org,2002:str", re.compile(r"^[0-9]+(?::[0-9]+)+$")), *rows]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _loaded(text: str) -> Any:
    """Return the value of `text` as YAML; ValueError says in one line why it has none."""
    try:
        return yaml.load(text, Loader=_OnceLoader)  # a safe loader, only stricter
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML ({' '.join(str(error).split())})") from error
    except ValueError as error:  # raised not by YAML's reader, but by what makes numbers and dates of its values
        if "int_max_str_digits" in str(error):
            raise ValueError(f"not YAML (a number of more than {sys.get_int_max_str_digits()} digits)") from error
        raise ValueError(f"not YAML ({error})") from error
    except (LookupError, AttributeError) as error:  # a tag such as !!bool stands before another type
        raise ValueError("not YAML (a value that is not of the type that its tag names)") from error
    except RecursionError as error:
        raise ValueError("not YAML (lists or mappings too deep in one another)") from error
