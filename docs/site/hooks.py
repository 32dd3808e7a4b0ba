"""The pages of docs/ as a site: what differs from the pages as GitHub shows them.

Links to files outside docs/ become the names of these files. Pages of the log and of decisions are left out of the search: they
are reached from the pages that cite them.
"""

import json
import re
from pathlib import Path
from typing import Any

NOT_SEARCHED = ("log/", "decisions/")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+[^)]*\)|\[([^\]]+)\]\(decisions\)")


def on_page_markdown(markdown: str, **page: Any) -> str:
    """Return the text of a page for the site."""
    inside = page["page"].file.src_uri.count("/")
    return _OUTSIDE.sub(lambda link: link[0] if link[0].count("../") <= inside and link[1] else link[1] or link[2], markdown)


def searched(index: dict[str, Any]) -> dict[str, Any]:
    """Return the index of the search without the pages that are left out."""
    return index | {"docs": [entry for entry in index["docs"] if not entry["location"].startswith(NOT_SEARCHED)]}


def on_post_build(config: Any) -> None:
    """Write the index of the search anew."""
    path = Path(config["site_dir"]) / "search" / "search_index.json"
    path.write_text(json.dumps(searched(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
