"""The site's navigation has every page that it should, so that `make site` builds without warnings.

Run: pytest tests/style/test_site.py
"""

import pydoc
import re
from pathlib import Path
from typing import Any

import yaml

import headrace

ROOT = Path(__file__).resolve().parents[2]
BESIDE = ("log", "decisions")  # reached from pages, not from the navigation


def pages_of(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [page for child in children for page in pages_of(child)]


def test_each_page_is_in_the_navigation_once() -> None:
    found = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    expected = {page for page in pages if page.split("/")[0] not in BESIDE} | {"log/README.md"}
    assert sorted(found) == sorted(expected)


def test_each_name_of_the_reference_is_there() -> None:
    names = re.findall(r"^::: (.+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) > 5
    assert [name for name in names if not pydoc.locate(name)] == []
    shown = {name.rpartition(".")[2] for name in names}
    assert {name for name in headrace.__all__ if not name.endswith("Options") and name != "set_process_defaults"} <= shown
