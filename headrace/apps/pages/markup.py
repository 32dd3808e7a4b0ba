"""Small pieces of HTML and SVG: escaping, elements, round numbers for axes, figures as people read them.

Invariant: every text that comes from a run passes through `escape`; names of files and models may hold anything.
"""

import html
import json
import math
from typing import Any

from headrace.terms.plain_figures import plain_figure


def escape(text: object) -> str:
    """Return `text` safe inside elements and quoted attributes."""
    return html.escape(str(text), quote=True)


def element(name: str, *children: str, **attributes: object) -> str:
    """Return an element. Children are markup; an attribute `class_` is written as `class`, `data_at` as `data-at`."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(children)
    return f"<{name}{words}/>" if not inner and name in _EMPTY else f"<{name}{words}>{inner}</{name}>"


def data_block(identity: str, values: Any) -> str:
    """Return `values` as JSON for the page's script. `<` cannot end the element early, because it is written as an escape."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{escape(identity)}">{text}</script>'


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers within `[low, high]`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def figure(value: float, digits: int = 3) -> str:
    """Return a number in `digits` significant digits, thin spaces between thousands: `12 400`, `0.0031`, `1e-05`."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    if abs(value) >= 1000 or "e+" in f"{value:.{digits}g}":
        rounded = round(value, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{rounded:,.0f}".replace(",", "\u2009")
    return f"{value:.{digits}g}"


def rate(value: float, unit: str) -> str:
    """Return a rate in decimal units, as drives and links are sold: `6.8 GB/s`, `71 TFLOP/s`."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:  # below this, three digits would show 1000 of the smaller unit
            return f"{plain_figure(value / factor)} {letter}{unit}/s"
    return f"{plain_figure(value)} {unit}/s"


def decimal_bytes(value: float) -> str:
    """Return a number of bytes in decimal units, as the ratings of drives are given: `1.2 TB`."""
    return rate(value, "B").removesuffix("/s")


_EMPTY = {"rect", "line", "path", "polyline", "circle", "meta", "col", "hr", "br"}


def _number(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
