"""Values of JSON that are almost right: hypothesis changes some of them, at any depth."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

# What a file of JSON may hold where something else is expected.
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**70), 10**400, 0.5, -1.5, 1e308, float("nan"), float("inf")),
    *(
        "",
        " ",
        "x",
        "1",
        "0.5",
        "none",
        "assistant",
        "\ud83d",
        "a \udc80 b",
        "\0",
        "\u202e",
        "w" * 5000,
        "{",
        '{"a": 1}',
        "[1]",
    ),
    *([], [[]], [None], [1, 2], ["x"], [0.5], [{}], [True], {}, {"x": 1}, {"": None}, {"type": "text"}, {"role": "user"}),
    *([[[[["x"]]]]], [["x", 1], None]),
)

Path = tuple[str | int, ...]


def paths(value: Any, prefix: Path = ()) -> Iterator[Path]:
    """Yield where each value within `value` is, outer ones first."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*prefix, key)
        yield from paths(each, (*prefix, key))


@st.composite
def mutated(draw: st.DrawFn, value: Any, junk: Sequence[Any] = JUNK, most: int = 3) -> Any:
    """Draw `value` with one to `most` changes: another value, none, one more, one inside a list, or one by another's name."""
    made = copy.deepcopy(value)
    names = sorted({key for path in paths(value) for key in path if isinstance(key, str)})
    for _ in range(draw(st.integers(1, most))):
        places = list(paths(made))
        if not places:
            break
        *outer, last = draw(st.sampled_from(places))
        holder = made
        for key in outer:
            holder = holder[key]
        other = copy.deepcopy(draw(st.sampled_from(junk)))
        way = draw(st.sampled_from(("junk", "junk", "junk", "remove", "wrap", "twice", "name")))
        if way == "junk":
            holder[last] = other
        elif way == "remove":
            del holder[last]
        elif way == "wrap":
            holder[last] = [holder[last]]
        elif isinstance(holder, list):
            holder.insert(last, copy.deepcopy(holder[last]) if way == "twice" else other)
        elif way == "twice":
            holder[draw(st.sampled_from(names))] = holder[last]
        else:
            holder[draw(st.sampled_from(names))] = other
    return made
