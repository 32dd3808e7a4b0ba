"""`~` in a path is the user's own directory, wherever an option is a path: in YAML, in key=value, from a program."""

from pathlib import Path
from typing import Any

import pytest

from headrace.files.yaml_options import parse_changes
from headrace.terms.options.compress_options import CompressOptions
from headrace.terms.options.declared import Declaration, Declared
from headrace.terms.options.eval_options import EvalOptions
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.option_kinds import Either, Listed, PathOf, PlaceOrName
from headrace.terms.options.run_options import NodeOptions
from headrace.terms.options.serve_options import ServeOptions

CLASSES: tuple[type[Declared], ...] = (NodeOptions, EvalOptions, GenerateOptions, ServeOptions, CompressOptions)


def is_place(each: Declaration) -> bool:
    kind = each.kind.of if isinstance(each.kind, Listed) else each.kind.other if isinstance(each.kind, Either) else each.kind
    return isinstance(kind, PathOf | PlaceOrName)


PLACES = [(cls, each) for cls in CLASSES for each in cls.declarations() if is_place(each)]


def test_all_places_are_found() -> None:
    found = {each.key for _, each in PLACES}
    assert {"model", "data", "output", "ssd", "cache", "plan", "machine", "secret", "adapter"} <= found


@pytest.mark.parametrize(("cls", "each"), PLACES, ids=lambda value: getattr(value, "key", None) or value.__name__)
def test_home_is_the_users_own_directory(
    cls: type[Declared], each: Declaration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, expected in (
        ("~/a", f"{tmp_path}/a"),
        ("x~/a", "x~/a"),
        ("./~/a", "./~/a"),
        ("~nobody-here/a", "~nobody-here/a"),
    ):
        for value in (given, parse_changes([f"{each.key}={given}"])[each.key]):
            found: Any = each.read(value)
            found = found[0] if isinstance(found, tuple) else found
            assert Path(found) == Path(expected)
