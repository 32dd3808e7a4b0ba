"""The page of errors says what is: each message is one of the package, and a test (faults.txt) makes it happen.

Run: pytest tests/cli/test_errors_page.py
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
FEWEST_FAULTS = 40

_ROW = re.compile(r"^- (?P<fault>.+?)(?: \(\d[\d, ]*\))?:\n  (?P<says>.+)$", re.MULTILINE)
# The test that makes each trouble of the page happen.
TESTS = dict(line.split(" | ") for line in (Path(__file__).parent / "faults.txt").read_text(encoding="utf-8").splitlines())


def strings(path: Path) -> Iterator[str]:
    """Yield the strings of a module. Values that are filled in end a string: a message is found by what stands between."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_and_tests_are_there() -> None:
    rows = list(_ROW.finditer(PAGE))
    assert len(rows) == PAGE.count("\n- "), "a row is not understood"
    assert [row["fault"] for row in rows] == list(TESTS)
    assert len(rows) >= FEWEST_FAULTS
    said = "\n".join(each for path in (ROOT / "headrace").rglob("*.py") for each in strings(path))
    tests = {place: (ROOT / place.split("::")[0]).read_text(encoding="utf-8") for place in TESTS.values()}
    wrong = [place for place, text in tests.items() if f"def {place.split('::')[1]}(" not in text]
    for row in rows:
        words = row["says"].strip("`")
        if row["says"].startswith("`") and words not in said and words not in tests[TESTS[row["fault"]]]:
            wrong.append(words)
    assert wrong == []
