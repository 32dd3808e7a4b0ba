"""Only lines that hold code are counted. Run: pytest tests/bench/test_bench_house.py"""

from pathlib import Path

from house import code_lines, measured

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


def test_folders_imports_and_the_longest_are_named(tmp_path: Path) -> None:
    for name, text in {"one/a.py": TEXT, "two/b.py": "from headrace.one.a import VALUE\n", "__init__.py": ""}.items():
        path = tmp_path / "headrace" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    house = measured(tmp_path)
    assert (house.lines["one"], house.lines["two"], house.lines.total()) == (7, 1, 8)
    assert house.longest_file == (7, "one/a.py")
    assert house.longest_function == (5, "one/a.py: double")
    assert house.imports == {("two", "one")}
