"""Only lines that hold code are counted. Run: pytest tests/bench/test_bench_house.py"""

import ast
import subprocess
from pathlib import Path

from house import changes, code_lines, dataclass_fields, duplicate_places, files_to_add, knots, measured, shapes

TEXT = '''"""A module.

Of three lines.
"""

# A comment.
VALUE = """a
b"""  # code: it is no docstring


def double(x: int) -> int:
    """Return twice `x`."""
    return (
        x
        + x
    )
'''


def test_blank_lines_comments_and_docstrings_are_no_code() -> None:
    assert sorted(code_lines(TEXT)) == [7, 8, 11, 13, 14, 15, 16]


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "headrace" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_folders_imports_and_the_longest_are_named(tmp_path: Path) -> None:
    house = measured(tree(tmp_path, {"one/a.py": TEXT, "two/b.py": "from headrace.one.a import VALUE\n", "__init__.py": ""}))
    assert (house.lines["one"], house.lines["two"], house.lines.total()) == (7, 1, 8)
    assert house.functions == {"one/a.py: double": 6}
    assert house.parameters == {"one/a.py: double": 1}
    assert house.imports == {("two", "one")}
    assert (house.comments, house.large, house.knots) == (2, {}, ([], []))


def test_fields_of_a_dataclass_are_counted_with_inherited_ones_and_options_are_none() -> None:
    text = """
class Plain:
    size: int

@dataclass(frozen=True)
class Base:
    name: str
    size: int = 3
    kind: ClassVar[str] = "base"

@dataclass
class Both(Base, Plain):
    size: float
    options: int

@dataclass
class Words:
    rows: int = option(1, "Rows.")

@dataclass
class More(Words):
    columns: int = 1
"""
    assert dataclass_fields({"headrace.a": ast.parse(text)}) == {"Base": 2, "Both": 3}


def test_circles_of_imports_are_knots_and_what_hangs_on_them_is_none() -> None:
    texts = {
        "headrace.a": "from headrace.b import x",
        "headrace.b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from headrace.a import y",
        "headrace.c": "import headrace.a",
    }
    trees = {name: ast.parse(text) for name, text in texts.items()}
    assert knots(trees, for_types=False) == []
    assert knots(trees, for_types=True) == ["headrace.a", "headrace.b"]


def test_lines_of_one_shape_in_two_files_are_a_duplicate_and_few_lines_are_none() -> None:
    body = "\n".join(f"    first_{number} = compute(second, number={number})" for number in range(6))
    other = body.replace("first", "third").replace("compute", "make")
    assert duplicate_places({"a": shapes(f"def f():\n{body}"), "b": shapes(f"def g():\n{other}")}) == 1
    short = "\n".join(body.splitlines()[:4])
    assert duplicate_places({"a": shapes(f"def f():\n{short}"), "b": shapes(f"def f():\n{short}")}) == 0


def test_a_range_adds_up_commits_and_a_file_that_only_moves_counts_for_nothing(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    git("init", "-q")
    for number, files in enumerate(({"a.py": TEXT}, {"a.py": TEXT + "MORE = 1\n"}, {"a.py": TEXT})):
        git("add", str(tree(tmp_path, files)))
        git("commit", "-q", "-m", str(number))
    (tmp_path / "headrace" / "room").mkdir()
    git("mv", str(tmp_path / "headrace" / "a.py"), str(tmp_path / "headrace" / "room" / "b.py"))
    git("commit", "-q", "-m", "moved")
    added, removed = changes(tmp_path, "HEAD~3..HEAD")
    assert (added.total(), removed.total()) == (1, 1)


def test_the_files_of_a_worked_example_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    blocks = ("a.py, new in headrace/x", "a.py, new in headrace/y", "b/c.py, above NAME", "b/c.py, in ROWS")
    text = "".join(f"```python\n# {block}\npass\n```\n" for block in blocks)
    (tmp_path / "docs" / "extending.md").write_text(f"# Page\n\n## A thing\n\n{text}\n## Another\n\nNothing.\n")
    assert files_to_add(tmp_path) == {"files for a thing": "3"}
