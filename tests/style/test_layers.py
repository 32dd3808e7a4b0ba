"""The rules of the house that a machine can check: layers, documentation, no hidden state, sizes of files and functions.

Each test names all that break its rule. Run: pytest tests/style
"""

import ast
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from house import dataclass_fields

ROOT = Path(__file__).parents[2] / "headrace"

# From the bottom up. Packages of one row are siblings: they never import one another (docs/architecture.md).
LAYERS: tuple[tuple[str, ...], ...] = (
    ("terms",),
    ("machine",),
    ("codec", "files"),
    ("data", "model", "plan"),
    ("losses", "report", "store"),
    ("update",),
    ("flow",),
    ("measure",),
    ("ask",),
    ("engine",),
    ("compress", "generate", "migrate", "runs"),
    ("peers",),
    ("apps", "integrations", "process", "serve"),
    ("cli",),
    ("testing",),
    ("__main__",),
)
RANK = {package: rank for rank, packages in enumerate(LAYERS) for package in packages}
WITHOUT_TORCH = ("files", "plan", "store", "terms")
AT_HAND = {"headrace", *sys.stdlib_module_names}  # all that `terms` may import
WARNED_LINES_OF_A_FILE, MOST_LINES_OF_A_FILE = 300, 400
MOST_LINES_OF_A_FUNCTION = 80
MOST_FIELDS = 25

FILES = sorted(ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the full name of all modules and names imported, also inside functions."""
    for node in ast.walk(TREES[path]):
        place = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from ((place, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((place, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)


def test_every_package_has_a_layer() -> None:
    assert {package_of(path) for path in FILES} - {"__init__"} == RANK.keys()


def breaks_layers(package: str, full_name: str) -> bool:
    """Say whether an import points up or sideways, or does not say its full name."""
    parts = full_name.split(".")
    if parts[0] != "headrace":
        return not parts[0]
    if len(parts) == 1 or parts[1] == package:
        return False
    if parts[1] in RANK:
        return RANK[parts[1]] >= RANK[package]
    return RANK[package] < RANK["engine"]  # a name of the front itself, such as the version: only engine and above may


def test_imports_point_down() -> None:
    inside = [path for path in FILES if package_of(path) != "__init__"]  # the front of the house offers what lies behind it
    found = [(place, name) for path in inside for place, name in imports(path) if breaks_layers(package_of(path), name)]
    assert found == [], "imports that do not point down, or are relative"


def test_what_points_up_or_sideways_is_seen() -> None:
    refused = (("plan", "headrace.model.Chain"), ("plan", "headrace.engine"), ("plan", "headrace.Budget"), ("plan", ".search"))
    allowed = (
        ("plan", "headrace.terms.sizes.GIB"),
        ("plan", "headrace.plan.search.search"),
        ("cli", "headrace.Budget"),
        ("plan", "math"),
    )
    assert [breaks_layers(*one) for one in refused + allowed] == [True] * 4 + [False] * 4


def test_what_needs_no_torch_imports_none() -> None:
    found = []
    for path in FILES:
        outside = {(place, name) for place, name in imports(path) if name.split(".")[0] in ("torch", "transformers")}
        if package_of(path) == "terms":
            outside |= {(place, name) for place, name in imports(path) if name.split(".")[0] not in AT_HAND}
        if package_of(path) in WITHOUT_TORCH:
            found += sorted(outside)
    assert found == []


# What stands beside the core: several machines, and applications of other people's programs.
BESIDE = {"apps", "peers", "integrations", "migrate", "serve", "testing"}


def test_the_core_knows_neither_peers_nor_other_peoples_programs() -> None:
    """What computes, updates and plans sees a site, and nothing of how bytes travel to it."""
    core = [path for path in FILES if package_of(path) not in BESIDE | {"cli", "__main__"}]
    beside = re.compile(rf"headrace\.({'|'.join(BESIDE)})\b")
    found = [(place, name) for path in core for place, name in imports(path) if beside.match(name)]
    assert found == []


def test_only_one_room_knows_the_library_of_peers() -> None:
    others = [path for path in FILES if path.parent != ROOT / "peers" / "meet"]
    assert [place for path in others for place, name in imports(path) if name.startswith("torch.distributed")] == []


def test_the_command_line_imports_what_stands_beside_the_core_by_its_faces() -> None:
    inside = [(place, name) for path in FILES if package_of(path) == "cli" for place, name in imports(path)]
    beside = rf"headrace\.(integrations\.\w+|{'|'.join(BESIDE - {'integrations'})})\.\w+\."
    assert [(place, name) for place, name in inside if re.match(beside, name)] == []


def test_every_module_says_what_it_is_for() -> None:
    assert [name_of(path) for path in FILES if not (ast.get_docstring(TREES[path]) or "").strip()] == []


def hidden(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the kind of what works behind the back of arguments and results."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, "module state by `global`"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "print outside cli; emit an event"
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
            yield node.lineno, "reads the environment below cli"


def test_nothing_is_hidden() -> None:
    found = [(name_of(path), line, kind) for path in FILES for line, kind in hidden(TREES[path])]
    assert [one for one in found if not one[0].startswith(("cli/", "process.py")) or "global" in one[2]] == []


def test_what_is_hidden_is_seen() -> None:
    tree = ast.parse("def f():\n    global x\n    print(os.environ, os.getenv('A'), self.print())")
    assert sorted(line for line, _ in hidden(tree)) == [2, 3, 3, 3]


def is_lazy_face(tree: ast.Module) -> bool:
    """Say whether a package's front does nothing but offer what it imports under `TYPE_CHECKING` (`terms.faces`)."""
    for node in tree.body[1:]:  # after the docstring
        if isinstance(node, ast.ImportFrom):
            if node.module not in ("typing", "headrace.terms.faces"):
                return False
        elif isinstance(node, ast.If):
            offered = [alias for each in node.body if isinstance(each, ast.ImportFrom) for alias in each.names]
            if ast.unparse(node.test) != "TYPE_CHECKING" or any(alias.asname not in (None, alias.name) for alias in offered):
                return False
        elif ast.unparse(node) != "__getattr__ = lazy_face(__name__)":
            return False
    return True


def test_faces_of_packages_are_lazy() -> None:
    faces = [path for path in FILES if path.name == "__init__.py" and path.parent != ROOT]
    assert [name_of(path) for path in faces if not is_lazy_face(TREES[path])] == []
    assert not is_lazy_face(ast.parse('"""Eager."""\nfrom headrace.model.costs.cost_profile import skip as skip'))


def test_a_face_offers_no_name_of_a_module_beside_it() -> None:
    """Once that module is imported the name would mean the module."""
    found = []
    for path in FILES:
        if path.name == "__init__.py" and path.parent != ROOT:
            beside = {each.stem for each in path.parent.iterdir()}
            found += [f"{name_of(path)}: {name}" for _, full in imports(path) if (name := full.rpartition(".")[2]) in beside]
    assert found == []


# Rooms of packages from the left to the right ("": files beside the rooms): a room imports those to its left.
ROOMS: dict[str, tuple[str, ...]] = {
    "terms": ("", "machine", "options"),
    "data": ("values", "chat", "read", "pairs", "tokens", "batches"),
    "model": (
        *("blocks", "stored", "directory", "parts", "kernels", "gguf", "trials", "chain", "written", "adapters", "streams"),
        *("costs", "by_rows", "caches", "seats"),
    ),
    "plan": ("value", "clock", "schedules", "forecast", "search"),
    "update": ("rules", "tables", "sites", "projectors", "wires", ""),
    "flow": ("run", "weights", "step"),
    "generate": ("plan", "passes", "uses"),
    "apps": ("gguf", "pages"),
    "peers": ("meet", "ranks", "stages", "local_steps", "node", ""),
}


def room_of(module: str) -> str:
    """Return the room of a module of `headrace.PACKAGE`; "" for one beside the rooms."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[2] in ROOMS[parts[1]] else ""


def test_a_room_imports_rooms_to_its_left() -> None:
    found = []
    for path in FILES:
        package = package_of(path)
        if package not in ROOMS or path == ROOT / package / "__init__.py":
            continue
        order, own = ROOMS[package], room_of("headrace." + name_of(path).replace("/", "."))
        for place, name in imports(path):
            inside = name.startswith(f"headrace.{package}.")
            if inside and order.index(room_of(name)) > order.index(own):
                found.append(f"{place}: {name}")
            if inside and room_of(name) == "" and "" not in order:
                found.append(f"{place}: {name}, by the package's own face")
    assert found == []


def test_every_folder_of_a_package_with_rooms_is_a_room() -> None:
    for package, rooms in ROOMS.items():
        folders = {path.name for path in (ROOT / package).iterdir() if path.is_dir()} - {"__pycache__", "machines"}
        assert folders == set(rooms) - {""}, package


def test_files_and_functions_stay_readable() -> None:
    found, long = [], []
    for path, tree in TREES.items():
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > WARNED_LINES_OF_A_FILE:
            long.append(f"{name_of(path)} {lines}")
        if lines > MOST_LINES_OF_A_FILE:
            found.append(f"{name_of(path)}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.body[0].lineno + 1
                if length > MOST_LINES_OF_A_FUNCTION:
                    found.append(f"{name_of(path)}: {node.name}: {length} lines")
    if long:
        warnings.warn(f"{len(long)} files have over {WARNED_LINES_OF_A_FILE} lines: {', '.join(long)}", stacklevel=1)
    assert found == []


def test_a_dataclass_has_few_fields_and_groups_of_more() -> None:
    fields = dataclass_fields({name_of(path): tree for path, tree in TREES.items()})
    assert {name: count for name, count in fields.items() if count > MOST_FIELDS} == {}


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


def test_no_two_files_of_tests_have_one_name() -> None:
    """Run whole, the suite refuses the second; run by folder, nobody notices."""
    names = [path.name for path in Path(__file__).parents[1].rglob("*.py") if path.name != "conftest.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []
