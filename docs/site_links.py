"""Links of the pages to files outside docs/, which the site does not have, become the names of these files."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+[^)]*\)|\[([^\]]+)\]\(decisions\)")


def on_page_markdown(markdown: str, **page: Any) -> str:
    """Return the text of a page for the site."""
    inside = page["page"].file.src_uri.count("/")
    return _OUTSIDE.sub(lambda link: link[0] if link[0].count("../") <= inside and link[1] else link[1] or link[2], markdown)
