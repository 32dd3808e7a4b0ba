"""Faces of packages: what a package offers is imported when it is first asked for."""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_face(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that offers what its `__init__.py` imports under `TYPE_CHECKING`, and nothing else.

    So the list that type checkers read is the only one. An offered name must not be that of a module in the package.
    """

    @cache
    def homes() -> dict[str, str]:
        tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
        under = (node for block in tree.body if isinstance(block, ast.If) for node in block.body)
        return {each.name: str(node.module) for node in under if isinstance(node, ast.ImportFrom) for each in node.names}

    def offered(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(homes()[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return offered
