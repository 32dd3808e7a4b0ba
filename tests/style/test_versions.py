"""The versions that Headrace says it runs with are those that `make test` and `make test-oldest` install."""

import itertools
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_FOR_TESTS = {"mypy", "ruff"}


def requirements() -> dict[str, Requirement]:
    """Return what is asked for: for use, and for the tests."""
    lines = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]
    return {canonicalize_name(found.name): found for found in map(Requirement, lines)}


def pinned(file: str) -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    bounds = {}
    for name, asked in requirements().items():
        lower = [bound.version for bound in asked.specifier if bound.operator == ">="]
        if lower and name not in NOT_FOR_TESTS:
            (bounds[name],) = lower
    oldest = {name: Version(version) for name, version in pinned("constraints-oldest.txt").items()}
    assert oldest == {name: Version(version) for name, version in bounds.items()}


def test_the_newest_versions_are_allowed() -> None:
    newest = pinned("constraints.txt")
    assert set(requirements()) <= set(newest)
    for name, asked in requirements().items():
        assert asked.specifier.contains(newest[name]), asked


def test_the_readme_names_the_oldest_versions() -> None:
    oldest = pinned("constraints-oldest.txt")
    torch, transformers = (".".join(oldest[name].split(".")[:2]) for name in ("torch", "transformers"))
    assert f"PyTorch {torch} and newer, transformers {transformers} and newer" in (ROOT / "README.md").read_text()
