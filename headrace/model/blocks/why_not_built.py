"""Why a model cannot be built from its configuration, in words for the person who wrote it.

Invariant: nothing that transformers would accept is refused here: these are reasons for what has failed already.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.terms.errors import in_one_line

_ACTIVATION_KEYS = ("act", "activation", "activation_function", "act_fn")


def why_not_built(values: Mapping[str, Any], error: BaseException) -> str:
    """Return why a model could not be built: a misspelt word of its configuration if there is one, else `error`.

    `values` are those of the configuration; the known words are the installed transformers'.
    """
    return next(_misspelt(values), in_one_line(error))


def _misspelt(values: Mapping[Any, Any]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _misspelt(value)
        elif isinstance(value, str) and isinstance(key, str):
            known: Iterable[str] = ()
            if key.endswith(_ACTIVATION_KEYS):
                known = ACT2FN.keys()
            elif key in ("rope_type", "type"):
                known = ("default", *ROPE_INIT_FUNCTIONS)
            if known and value not in known:
                yield f"{key} is {value!r}, which transformers does not know{nearest_name(value, known)}"


def nearest_name(word: str, known: Iterable[str]) -> str:
    """Return words that name what was probably meant, or all that is known."""
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"
