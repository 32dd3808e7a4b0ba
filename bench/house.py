"""The house in figures: lines of code of each folder, the longest file and function, and who imports whom.

Counted are lines that hold code: no blank lines, no comments, no docstrings. Run: python bench/house.py [TREE ...]
(a TREE is a checkout; several are shown beside one another)
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class House(NamedTuple):
    """Code lines by folder, `(lines, name)` of the longest file and function, and pairs of folders: one imports the other."""

    lines: Counter[str]
    longest_file: tuple[int, str]
    longest_function: tuple[int, str]
    imports: set[tuple[str, str]]


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


def measured(root: Path) -> House:
    """Return the figures of the package `headrace` in the checkout `root`."""
    package = root / "headrace"
    lines: Counter[str] = Counter()
    files, functions = [], []
    imports: set[tuple[str, str]] = set()
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package))
        folder = path.relative_to(package).parts[0].removesuffix(".py")
        text = path.read_text(encoding="utf-8")
        tree, code = ast.parse(text), code_lines(text)
        lines[folder] += len(code)
        files.append((len(code), name))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.append((len(code & set(range(node.lineno, (node.end_lineno or 0) + 1))), f"{name}: {node.name}"))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace."):
                imports.add((folder, (node.module or "").split(".")[1]))
    return House(lines, max(files), max(functions), {(one, other) for one, other in imports if one != other})


def main() -> None:
    """Print the figures of each tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    houses = [measured(tree) for tree in parser.parse_args().trees]
    folders = sorted({folder for house in houses for folder in house.lines})
    for folder in folders:
        print(f"{folder:16}" + "".join(f"{house.lines[folder]:8}" for house in houses))
    print(f"{'all':16}" + "".join(f"{house.lines.total():8}" for house in houses))
    for house in houses:
        print(f"longest file {house.longest_file}, longest function {house.longest_function}")
        print(f"{len(house.imports)} pairs of folders of which one imports the other")


if __name__ == "__main__":
    main()
