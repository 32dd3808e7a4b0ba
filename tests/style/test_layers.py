"""The rules of the house that a machine can check: layers, documentation, no hidden state, sizes of files and functions.

Run: pytest tests/style
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "headrace"

# From the bottom up. Packages of one row are siblings: they never import one another (docs/architecture.md).
LAYERS: tuple[tuple[str, ...], ...] = (
    ("terms",),
    ("machine",),
    ("files",),
    ("data", "model", "plan"),
    ("report", "store"),
    ("update",),
    ("flow",),
    ("measure",),
    ("answers",),
    ("engine",),
    ("runs",),
    ("cli",),
    ("testing",),
    ("__main__",),
)
RANK = {package: rank for rank, packages in enumerate(LAYERS) for package in packages}
WITHOUT_TORCH = ("files", "plan", "store", "terms")
MOST_LINES_OF_A_FILE = 400
# Known to be longer. A number here may shrink, and no line may be added without a reason beside it.
LONGER = {
    "engine/trainer.py": 600,  # the one place where all parts meet
    "plan/program.py": 550,  # one step's program, read from top to bottom
    "update/kernels.py": 700,  # numba's cache sees changes of a loop's own file only, so all loops are in one
}
MOST_LINES_OF_A_FUNCTION = 80

FILES = sorted(path for path in ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the full names of all modules and names imported, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


every_file = pytest.mark.parametrize("path", FILES, ids=name_of)


def test_every_package_has_a_layer() -> None:
    assert {package_of(path) for path in FILES} - {"__init__"} == RANK.keys()


@every_file
def test_imports_point_down(path: Path) -> None:
    package = package_of(path)
    if package == "__init__":  # the front of the house: it offers what lies behind it
        return
    for full_name in imports(tree_of(path)):
        parts = full_name.split(".")
        if parts[0] != "headrace" or len(parts) == 1 or parts[1] == package:
            continue
        target = parts[1]
        if target not in RANK:  # a name of the front itself, such as the version
            assert RANK[package] >= RANK["engine"], f"{full_name}: only engine, runs and cli may import the front"
            continue
        assert RANK[target] < RANK[package], f"{package} imports {full_name}, which does not lie below it"


@every_file
def test_what_needs_no_torch_imports_none(path: Path) -> None:
    outside = {full_name.split(".")[0] for full_name in imports(tree_of(path))}
    if package_of(path) in WITHOUT_TORCH:
        assert not outside & {"torch", "transformers"}
    if package_of(path) == "terms":
        assert outside <= {"headrace", *sys.stdlib_module_names}


@every_file
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert (ast.get_docstring(tree_of(path)) or "").strip(), "no module docstring"


@every_file
def test_nothing_is_hidden(path: Path) -> None:
    in_cli = package_of(path) == "cli"
    for node in ast.walk(tree_of(path)):
        place = f"line {getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Global), f"{place}: module state by `global`"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not in_cli:
            assert node.func.id != "print", f"{place}: print outside cli; emit an event"
        if isinstance(node, ast.Attribute) and not in_cli:
            is_environment = isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in ("environ", "getenv")
            assert not is_environment, f"{place}: reads the environment below cli"


@every_file
def test_package_fronts_only_export(path: Path) -> None:
    if path.name != "__init__.py" or path.parent == ROOT:
        return
    tree = tree_of(path)
    imported: list[str] = []
    exported: list[str] = []
    for node in tree.body[1:]:  # after the docstring
        if isinstance(node, ast.ImportFrom):
            imported += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            assert [target.id for target in node.targets if isinstance(target, ast.Name)] == ["__all__"]
            exported = ast.literal_eval(node.value)
        else:
            pytest.fail(f"line {node.lineno}: an __init__.py only exports")
    assert sorted(imported) == sorted(exported)  # the order is ruff's to check (RUF022)


@every_file
def test_files_and_functions_stay_readable(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= LONGER.get(name_of(path), MOST_LINES_OF_A_FILE), f"{lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.body[0].lineno + 1
            assert length <= MOST_LINES_OF_A_FUNCTION, f"{node.name}: {length} lines"


def test_no_drawers() -> None:
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert [name_of(path) for path in FILES if path.stem in drawers or set(path.relative_to(ROOT).parts) & drawers] == []


def test_no_folder_has_the_name_of_a_module_beside_it() -> None:
    """Type checkers given part of the tree take such a folder for the module."""
    assert [name_of(path) for path in FILES if path.with_suffix("").is_dir()] == []


def test_the_architecture_page_names_every_package() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    missing = [package for package in RANK.keys() - {"__main__"} if f"{package}/" not in page and f"{package}.py" not in page]
    assert missing == []
