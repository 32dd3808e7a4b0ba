"""The site's navigation has every page that it should, so that `make site` builds without warnings.

Run: pytest tests/style/test_site.py
"""

import importlib.util
import pydoc
import re
from pathlib import Path
from typing import Any

import yaml

import headrace

ROOT = Path(__file__).resolve().parents[2]
BESIDE = ("log", "decisions")  # reached from pages, not from the navigation
MOST_COLUMNS, MOST_PAGES, MOST_WORDS = 3, 28, 1000  # words outside tables and code


def pages_of(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [page for child in children for page in pages_of(child)]


def test_each_page_is_in_the_navigation_once() -> None:
    found = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    expected = {page for page in pages if page.split("/")[0] not in BESIDE}
    assert sorted(found) == sorted(expected)


def read_by_users() -> dict[str, str]:
    """Return the pages for users: all chapters but the last, which is for developers."""
    chapters = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    names = [name for chapter in chapters if "Inside" not in chapter for name in pages_of(chapter)]
    return {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in names}


def test_a_phone_shows_tables_and_no_page_sends_users_to_tests() -> None:
    for name, text in read_by_users().items():
        shown = re.sub(r"<!--.*?-->", "", text)
        assert "tests/" not in shown, name
        # What stands between backticks may have bars in it.
        tables = [re.sub(r"`[^`]*`", "CODE", line) for line in shown.splitlines() if line.startswith("|")]
        assert [line for line in tables if line.count("|") - 1 > MOST_COLUMNS] == [], name


def test_pages_for_users_are_few_and_short() -> None:
    pages = read_by_users()
    words = {
        name: len(re.findall(r"\w[\w'-]*", re.sub(r"^(\|.*| {4}.*)$", "", text, flags=re.M))) for name, text in pages.items()
    }
    assert len(pages) <= MOST_PAGES
    assert {name: count for name, count in words.items() if count > MOST_WORDS} == {}


def test_the_log_and_decisions_are_not_searched() -> None:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    places = ["adapters.html", "log/lora.html", "decisions/0001-a.html#b", "node.html#log"]
    found = hooks.searched({"config": {}, "docs": [{"location": place} for place in places]})
    assert found == {"config": {}, "docs": [{"location": "adapters.html"}, {"location": "node.html#log"}]}


def test_each_name_of_the_reference_is_there() -> None:
    names = re.findall(r"^::: (.+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) > 5
    assert [name for name in names if not pydoc.locate(name)] == []
    shown = {name.rpartition(".")[2] for name in names}
    assert {name for name in headrace.__all__ if not name.endswith("Options") and name != "set_process_defaults"} <= shown
