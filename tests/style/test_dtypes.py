"""What is made of floats names its dtype: torch's default belongs to the whole process, and others change it."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKERS = {"empty", "zeros", "ones", "rand", "randn", "linspace", "full", "eye"}


def _unnamed(source: str) -> Iterator[int]:
    """Yield the lines of calls that make a tensor of torch's default dtype."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in MAKERS:
                if all(keyword.arg not in ("dtype", None) for keyword in node.keywords):
                    yield node.lineno


def test_no_tensor_is_made_of_the_default_dtype() -> None:
    assert [*_unnamed("torch.zeros(2)\ntorch.zeros(2, dtype=torch.int64)")] == [1]
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in (ROOT / "headrace").rglob("*.py") for line in _unnamed(path.read_text())
    ]
    assert found == []
