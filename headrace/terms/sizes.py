"""Byte counts and durations as people write and read them."""

import re
import reprlib

from headrace.terms.errors import ConfigError
from headrace.terms.plain_figures import plain_figure

MIB = 1 << 20
GIB = 1 << 30
# A page of memory, and the border by which direct input and output go.
PAGE_BYTES = 4096
# If freed memory is returned, blocks of this size or more go back at once. They lie on huge pages if the system has some.
MAPPED_BYTES = 2 << 20
# Of smaller freed blocks, so many bytes stay in the heap.
KEPT_FREE_BYTES = 64 << 20
# Where freed memory is kept, blocks larger than this go back all the same: glibc takes no larger ones from its heap.
LARGEST_HEAP_BLOCK_BYTES = 32 << 20
# Elements of a master that are joined or split at once, by operations that take four times its bytes, where units are merged.
MERGED_ELEMENTS = 1 << 20
# A size above this is a slip, and what is counted from it would not fit into the 64-bit numbers of the system.
_MOST_BYTES = 1 << 62
# The same limit for steps, rows and tokens.
MOST_COUNT = 1 << 62

# A bare letter is binary, as for ulimit, Docker and the JVM; "GB" is decimal as on drives; "GiB" is binary.
_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _FACTORS[_letter] = _FACTORS[_letter + "i"] = _FACTORS[_letter + "ib"] = 1024**_power
    _FACTORS[_letter + "b"] = 1000**_power

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*$")


def parse_bytes(text: str | int, *, name: str = "size") -> int:
    """Return the number of bytes that `text` names: `16GiB` and `16G` are 16·2^30, `16gb` is 16·10^9, `4096` is 4096.

    Raises:
        ConfigError: not a number with a known unit, not positive, or above 2^62. `name` is the option to blame.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise ConfigError(f"{name}: expected a size such as 16GiB, found {text!r}")
    if isinstance(text, int):
        value = text
    else:
        match = _SIZE.match(text)
        if match is None or match[2].lower() not in _FACTORS:
            raise ConfigError(
                f"{name}: {reprlib.repr(text)} is not a size; write a number and a unit, such as 16GiB, 16G (both 2^30) or "
                "16GB (10^9)"
            )
        # The smaller of both, because hundreds of digits are an infinite number, which cannot be rounded.
        value = round(min(float(match[1]) * _FACTORS[match[2].lower()], 2.0 * _MOST_BYTES))
    if value <= 0:
        raise ConfigError(f"{name}: {reprlib.repr(text)} is not a positive size")
    if value > _MOST_BYTES:
        raise ConfigError(f"{name}: {reprlib.repr(text)} is more than any machine has; the most is {_MOST_BYTES >> 40} TiB")
    return value


def format_bytes(num_bytes: float) -> str:
    """Return `num_bytes` in binary units with three significant digits: `1.25 GiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB" if abs(value) < 1000 else f"{value:.0f} TiB"


def format_seconds(seconds: float) -> str:
    """Return a duration as `850 ms`, `12.3 s`, `4 min 05 s` or `3 h 20 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def about_seconds(seconds: float) -> str:
    """Return a duration that is a guess: `about 40 ms`, `about 1.4 s`, `about 3 h`."""
    number, unit = seconds * 1e3, "ms"
    for size, name in ((1, "s"), (60, "min"), (3600, "h")):
        if seconds >= size:
            number, unit = seconds / size, name
    return f"about {rough_figure(number)} {unit}"


def rough_figure(value: float) -> str:
    """Return a guess as people write one: its first digit, and the second where the first is 1."""
    text = f"{value:.1e}" if f"{value:e}".startswith("1") else f"{value:.0e}"
    return plain_figure(float(text), 2)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
