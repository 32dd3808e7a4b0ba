"""Text files are UTF-8 whatever the locale says: whoever opens one names the encoding. Run: pytest tests/style"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("headrace", "bench", "demo") for path in sorted((ROOT / folder).rglob("*.py"))]


def opened_by_locale(source: str) -> Iterator[int]:
    """Yield the lines in which a text file is read, written or opened without an encoding."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(keyword.arg in ("encoding", None) for keyword in node.keywords):
            continue
        match node.func:
            case ast.Attribute(attr="read_text" | "write_text" as name) if len(node.args) <= (name == "write_text"):
                yield node.lineno
            case ast.Attribute(attr="open") if not node.args and not node.keywords:
                yield node.lineno
            case ast.Attribute(attr="open") | ast.Name(id="open"):
                given = [*node.args[isinstance(node.func, ast.Name) :][:1], *(keyword.value for keyword in node.keywords)]
                modes = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
                if (not modes and isinstance(node.func, ast.Name)) or (modes and "b" not in modes[0]):
                    yield node.lineno


def test_text_is_opened_as_utf8() -> None:
    found = [
        (str(path.relative_to(ROOT)), line) for path in SOURCES for line in opened_by_locale(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_what_the_locale_decides_is_seen() -> None:
    wrong = ["p.read_text()", "p.write_text(x)", "open(p)", "open(p, 'w')", "p.open()", "p.open('a')", "p.open(mode='w')"]
    right = [
        "p.read_text(encoding='utf-8')",
        "p.read_text('utf-8')",
        "open(p, 'rb')",
        "p.open('xb')",
        "open(p, 'w', encoding='utf-8')",
        "os.open(p, flags)",
        "Engine.open(model)",
        "p.open('rb', buffering=0)",
    ]
    assert [list(opened_by_locale(each)) for each in wrong] == [[1]] * len(wrong)
    assert [list(opened_by_locale(each)) for each in right] == [[]] * len(right)
