"""A mutant: one line of one function that is changed, by the function's name and not by its place in the file."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """The `nth` line of `function` (MODULE:QUALIFIED.NAME) that is `line` without its indent, `becomes` another."""

    function: str
    line: str
    becomes: str
    nth: int = 0

    @property
    def words(self) -> str:
        """What a person reads."""
        return f"{self.function}: {self.line}  ->  {self.becomes}"

    @property
    def module(self) -> str:
        """The module's name."""
        return self.function.partition(":")[0]

    def apply(self) -> None:
        """Change the function in this process, for all who have it.

        Raises:
            LookupError: the function or the line is not there any more; the list is to be renewed.
        """
        module, _, name = self.function.partition(":")
        found = function_of(importlib.import_module(module), name)
        path = Path(found.__code__.co_filename)
        found.__code__ = code_of(compile(self.changed(path.read_text(encoding="utf-8")), str(path), "exec"), name)

    def changed(self, source: str) -> str:
        """Return the text of the module with the change in it."""
        name, lines = self.function.partition(":")[2], source.splitlines()
        node = next((node for found, node in functions(ast.parse(source)) if found == name), None)
        if node is None or node.end_lineno is None:
            raise LookupError(f"{self.function} is not there")
        places = [at for at in range(node.lineno - 1, node.end_lineno) if lines[at].strip() == self.line]
        if len(places) <= self.nth:
            raise LookupError(f"{self.function} has no line {self.line!r}")
        at = places[self.nth]
        lines[at] = lines[at][: len(lines[at]) - len(lines[at].lstrip())] + self.becomes
        return "\n".join(lines) + "\n"


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions of a module, and the methods of its classes, by qualified name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, ast.FunctionDef))


def function_of(module: Any, name: str) -> FunctionType:
    """Return the plain function behind a qualified name: within properties, caches, context managers."""
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    for inner in ("fget", "func", "__func__"):
        found = getattr(found, inner, found)
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType), f"{name} is {type(found).__name__}"
    return found


def code_of(code: CodeType, name: str) -> CodeType:
    """Return the code object of a qualified name in that of its module."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_qualname == name:
                return each
            if name.startswith(f"{each.co_qualname}."):
                return code_of(each, name)
    raise LookupError(name)
