"""JSON that others may have written: whatever is wrong with it is a `ValueError`."""

import json
from typing import Any

# What code raises that takes values apart which are of other kinds than it expects.
UNSOUND = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def parse_json(text: str | bytes) -> Any:
    """Return the value that `text` has as JSON.

    Raises:
        ValueError: it is none, or its lists and objects lie too deep in one another to be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("lists or objects lie too deep in one another") from error
