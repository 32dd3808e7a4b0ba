"""Parts of pages that are generated: between `<!-- generated: SCRIPT -->` and `<!-- end -->`."""

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
END = "<!-- end -->\n"


def generated(page: str, script: str) -> str:
    """Return the part of a page of docs/ that `script` generates."""
    return _split(page, script)[1]


def renew(page: str, script: str, text: str) -> None:
    """Write that part anew."""
    before, _, after = _split(page, script)
    (DOCS / page).write_text(f"{before}{text}{after}", encoding="utf-8")


def _split(page: str, script: str) -> tuple[str, str, str]:
    begin = f"<!-- generated: {script} -->\n"
    before, found, rest = (DOCS / page).read_text(encoding="utf-8").partition(begin)
    text, end, after = rest.partition(END)
    assert found, f"{page} has no line {begin}"
    assert end, f"{page} has no line {END} behind it"
    return before + found, text, end + after
