"""The page of errors says what is: each message is one of the package, each test is there, and has what the page says.

Run: pytest tests/cli/test_errors_page.py
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
FEWEST_FAULTS = 40

_ROW = re.compile(
    r"^\| (?P<fault>[^|]+) \| (?P<code>[-\d, ]+) \| (?P<says>[^|]+) \| `(?P<file>[^`]+)::(?P<test>[^`]+)` \|$", re.MULTILINE
)


def strings(path: Path) -> Iterator[str]:
    """Yield the strings of a module. Values that are filled in end a string: a message is found by what stands between."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_and_tests_are_there() -> None:
    rows = list(_ROW.finditer(PAGE))
    assert len(rows) == PAGE.count("::"), "a row is not understood"
    assert len({row["fault"] for row in rows}) == len(rows) >= FEWEST_FAULTS
    said = "\n".join(each for path in (ROOT / "headrace").rglob("*.py") for each in strings(path))
    tests = {row["file"]: (ROOT / row["file"]).read_text(encoding="utf-8") for row in rows}
    wrong = [row["test"] for row in rows if f"def {row['test']}(" not in tests[row["file"]]]
    for row in rows:
        words = row["says"].strip("`")
        if row["says"].startswith("`") and words not in said and words not in tests[row["file"]]:
            wrong.append(words)
    assert wrong == []
