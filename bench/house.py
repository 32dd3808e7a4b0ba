"""The house in figures: `make house`, or `make house RANGE=A..B` for what commits added and removed.

Counted are lines that hold code: no blank lines, no comments, no docstrings. Run: python bench/house.py [TREE ...]
(a TREE is a checkout; several are shown beside one another), or python bench/house.py --range A..B
"""

import argparse
import ast
import io
import keyword
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

LARGE_FILE_LINES = 300
SAME_LINES = 6  # so many lines of one shape in two places are a duplicate
COMMON_PLACES = 8
THIN_CHARACTERS = 12 * SAME_LINES  # stretches with fewer are brackets and single names

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# Figures of one machine, each of which is measured by itself.
MACHINE_PROFILES = {"Ceilings"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class House(NamedTuple):
    """Figures of the package in a checkout.

    `lines`: lines of code by folder; `functions`: lines of each, by `file: name`, kernels left out; `parameters` likewise;
    `fields`: see `dataclass_fields`; `large`: lines of each file over `LARGE_FILE_LINES`; `knots`: modules that import one
    another, at import time and with what only type checkers import; `duplicates`: pairs of files that share lines of one shape.
    """

    lines: Counter[str]
    functions: dict[str, int]
    parameters: dict[str, int]
    fields: dict[str, int]
    large: dict[str, int]
    knots: tuple[list[str], list[str]]
    imports: set[tuple[str, str]]
    duplicates: int
    comments: int
    test_lines: int


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines of a module that hold code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return found - set(_docstring_lines(ast.parse(text)))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def shapes(text: str) -> list[str]:
    """Return the lines of code of a module, with names, numbers and strings made equal; imports and lone brackets are none."""
    tree, code = ast.parse(text), code_lines(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            code -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    words: dict[int, list[str]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _NOT_CODE or token.start[0] not in code:
            continue
        kept = token.type == tokenize.OP or keyword.iskeyword(token.string)
        words[token.start[0]].append(token.string if kept else {tokenize.NAME: "n"}.get(token.type, "c"))
    return [" ".join(words[line]) for line in sorted(words) if any(word.isalpha() for word in words[line])]


def duplicate_places(files: Mapping[str, list[str]]) -> int:
    """Return the pairs of files (or of one file with itself) that share `SAME_LINES` or more lines of one shape.

    Lines that stand in more than `COMMON_PLACES` places are a habit, no duplicate.
    """
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, lines in files.items():
        for start in range(len(lines) - SAME_LINES + 1):
            window = tuple(lines[start : start + SAME_LINES])
            if sum(map(len, window)) >= THIN_CHARACTERS:
                places[window].append((name, start))
    return len(
        {
            (one[0], other[0])
            for found in places.values()
            if len(found) <= COMMON_PLACES
            for index, one in enumerate(found)
            for other in found[index + 1 :]
            if one[0] != other[0] or other[1] - one[1] >= SAME_LINES
        }
    )


def is_kernel(function: Function) -> bool:
    """Return whether a function is compiled by numba or Triton."""
    return any("jit" in ast.unparse(each) for each in function.decorator_list)


def num_parameters(function: Function) -> int:
    """Return the parameters of a function without `self`."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + len(function.args.kwonlyargs)


def dataclass_fields(trees: Mapping[str, ast.Module]) -> dict[str, int]:
    """Return the fields of each dataclass with those that it inherits, by its name.

    Left out are classes that declare options, the profile of a machine, and what inherits from one of them.
    """
    classes = {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    is_dataclass = {
        name: any("dataclass" in ast.unparse(each) for each in node.decorator_list) for name, node in classes.items()
    }

    def lineage(name: str) -> Iterator[ast.ClassDef]:
        if name in classes:
            yield classes[name]
            for base in classes[name].bases:
                yield from lineage(ast.unparse(base).split("[")[0])

    def own(node: ast.ClassDef) -> list[ast.AnnAssign]:
        named = [each for each in node.body if isinstance(each, ast.AnnAssign) and is_dataclass[node.name]]
        return [each for each in named if "ClassVar" not in ast.unparse(each.annotation)]

    found = {name: [each for node in lineage(name) for each in own(node)] for name, real in is_dataclass.items() if real}
    return {
        name: len({ast.unparse(each.target) for each in fields})
        for name, fields in found.items()
        if MACHINE_PROFILES.isdisjoint(node.name for node in lineage(name)) and not any(map(_is_option, fields))
    }


def _is_option(field: ast.AnnAssign) -> bool:
    return isinstance(field.value, ast.Call) and ast.unparse(field.value.func) in ("option", "option_as")


def imported(tree: ast.Module, *, for_types: bool) -> set[str]:
    """Return the names of modules and of what is in them that a module imports when it is imported itself."""
    found: set[str] = set()

    def look(nodes: Collection[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                found.update((node.module, *(f"{node.module}.{each.name}" for each in node.names)))
            elif isinstance(node, ast.Import):
                found.update(each.name for each in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not for_types:
                look(node.orelse)
            elif not isinstance(node, Function):
                for name in ("body", "orelse", "finalbody", "handlers"):
                    look(getattr(node, name, []))

    look(tree.body)
    return found


def knots(trees: Mapping[str, ast.Module], *, for_types: bool) -> list[str]:
    """Return the modules, by full name, that are in a circle of imports."""
    edges = {
        module: {
            other
            for other in imported(tree, for_types=for_types)
            if other in trees and other != module and not module.startswith(f"{other}.")
        }
        for module, tree in trees.items()
    }
    while ends := {module for module, others in edges.items() if not others} | edges.keys() - set().union(*edges.values()):
        edges = {module: others - ends for module, others in edges.items() if module not in ends}
    return sorted(edges)


def measured(root: Path) -> House:
    """Return the figures of the package `headrace` in the checkout `root`."""
    package = root / "headrace"
    texts = {str(path.relative_to(package)): path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines: Counter[str] = Counter()
    functions: dict[str, int] = {}
    parameters: dict[str, int] = {}
    imports: set[tuple[str, str]] = set()
    for name, tree in trees.items():
        folder = Path(name).parts[0].removesuffix(".py")
        lines[folder] += len(code_lines(texts[name]))
        for node in ast.walk(tree):
            if isinstance(node, Function) and not is_kernel(node):
                functions[f"{name}: {node.name}"] = (node.end_lineno or 0) - node.lineno + 1
                if node.name not in ("option", "option_as"):
                    parameters[f"{name}: {node.name}"] = num_parameters(node)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace."):
                imports.add((folder, (node.module or "").split(".")[1]))
    modules = {".".join(("headrace", *Path(name).with_suffix("").parts)).removesuffix(".__init__"): name for name in trees}
    by_module = {module: trees[name] for module, name in modules.items()}
    comments = sum(
        token.type == tokenize.COMMENT
        for text in texts.values()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    tests = (root / "tests").rglob("*.py")
    return House(
        lines=lines,
        functions=functions,
        parameters=parameters,
        fields=dataclass_fields(trees),
        large={name: count for name, text in texts.items() if (count := text.count("\n")) > LARGE_FILE_LINES},
        knots=(knots(by_module, for_types=False), knots(by_module, for_types=True)),
        imports={(one, other) for one, other in imports if one != other},
        duplicates=duplicate_places({name: shapes(text) for name, text in texts.items()}),
        comments=comments,
        test_lines=sum(len(code_lines(path.read_text(encoding="utf-8"))) for path in tests),
    )


def rows(house: House) -> dict[str, str]:
    """Return the figures of a tree, each by its name."""
    sizes = sorted(house.functions.values())
    longest = max(house.functions, key=lambda name: house.functions[name], default="")
    widest = max(house.parameters, key=lambda name: house.parameters[name], default="")
    fullest = max(house.fields, key=lambda name: house.fields[name], default="")
    code = house.lines.total()
    return {
        "code lines": str(code),
        "functions p50/p90/max": f"{sizes[len(sizes) // 2]}/{sizes[len(sizes) * 9 // 10]}/{sizes[-1]}" if sizes else "-",
        "longest function": longest,
        "most parameters": f"{house.parameters[widest]} ({widest})" if widest else "-",
        "functions of more than 8": str(sum(count > 8 for count in house.parameters.values())),
        "most fields of a dataclass": f"{house.fields[fullest]} ({fullest})" if fullest else "-",
        f"files over {LARGE_FILE_LINES} lines": str(len(house.large)),
        "largest file": max(((count, name) for name, count in house.large.items()), default=("-", ""))[1],
        "modules in knots, at import": str(len(house.knots[0])),
        "modules in knots, with types": str(len(house.knots[1])),
        "pairs of folders that import": str(len(house.imports)),
        "duplicates in 1,000 lines": f"{1000 * house.duplicates / max(1, code):.2f}",
        "comments": str(house.comments),
        "test lines": str(house.test_lines),
    }


def files_to_add(root: Path) -> dict[str, str]:
    """Return the files that each worked example of docs/extending.md touches, by the section's title (`tests/extending.py`)."""
    found = {}
    page = (root / "docs" / "extending.md").read_text(encoding="utf-8")
    for section in page.split("\n## ")[1:]:
        named = re.findall(r"```python\n# ([\w/]+\.py), (new in [\w/]+|in|above)[ \n]", section)
        if touched := {(name, how if how.startswith("new") else "") for name, how in named}:
            found[f"files for {section.partition(chr(10))[0].lower()}"] = str(len(touched))
    return found


def changes(root: Path, commits: str) -> tuple[Counter[str], Counter[str]]:
    """Return the lines of code of the package that the commits of a range A..B added and removed, by folder.

    Each commit is compared with the one before it, file by file; a file that only moved counts for nothing.
    """
    added: Counter[str] = Counter()
    removed: Counter[str] = Counter()

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout

    for commit in git("rev-list", "--no-merges", commits).split():
        for line in git("diff", "--name-status", "-M", f"{commit}~", commit, "--", "headrace").splitlines():
            state, *names = line.split("\t")
            if not names[-1].endswith(".py"):
                continue
            old = "" if state == "A" else git("show", f"{commit}~:{names[0]}")
            new = "" if state == "D" else git("show", f"{commit}:{names[-1]}")
            before, after = _counted(old), _counted(new)
            folder = Path(names[-1]).parts[1].removesuffix(".py")
            added[folder] += (after - before).total()
            removed[folder] += (before - after).total()
    return added, removed


def _counted(text: str) -> Counter[str]:
    lines = text.splitlines()
    return Counter(lines[number - 1].strip() for number in code_lines(text))


def main() -> None:
    """Print the figures of each tree, or what a range of commits changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--range", dest="commits", help="A..B: the lines of code that these commits added and removed")
    asked = parser.parse_args()
    if asked.commits:
        added, removed = changes(asked.trees[0], asked.commits)
        for folder in sorted(added | removed):
            print(f"{folder:16}{added[folder]:+8}{-removed[folder]:+8}{added[folder] - removed[folder]:+8}")
        print(f"{'all':16}{added.total():+8}{-removed.total():+8}{added.total() - removed.total():+8}")
        return
    houses = [measured(tree) for tree in asked.trees]
    for folder in sorted({folder for house in houses for folder in house.lines}):
        print(f"{folder:32}" + "".join(f"{house.lines[folder]:>24}" for house in houses))
    figures = [rows(house) for house in houses]
    for name in figures[0]:
        print(f"{name:32}" + "".join(f"{each[name]:>24}" for each in figures))
    for name, count in files_to_add(Path(__file__).parents[1]).items():
        print(f"{name:32}{count:>24}")
    for house in houses:
        print("large: " + ", ".join(f"{name} {count}" for name, count in sorted(house.large.items(), key=lambda one: -one[1])))


if __name__ == "__main__":
    main()
