"""Loss, evaluation loss, gradient norm, learning rate and speed over steps, with marks for skipped steps and resumes.

Invariant: every value drawn was recorded. A long run is thinned by keeping the least and the greatest value of each stretch of
steps, so that no spike is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.apps.pages.markup import data_block, element, escape, figure, ticks
from headrace.report.metrics import Record

_MOST_POINTS = 1200
_WIDTH, _HEIGHT = 1000.0, 150.0
_CHARTS = (
    ("loss", "Loss", ""),
    ("eval_loss", "Evaluation loss", ""),
    ("grad_norm", "Gradient norm", ""),
    ("lr", "Learning rate", ""),
    ("tokens_per_second", "Speed", " tokens/s"),
)

Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Skipped steps with their reasons, and the first steps after a resume."""

    skipped: dict[int, str]
    resumed: tuple[int, ...]


def step_charts(records: Sequence[Record], marks: Marks, evaluations: Sequence[Record] = ()) -> str:
    """Return a card for each quantity that was recorded, and the data for the page's script."""
    first, last = int(records[0]["step"]), int(records[-1]["step"])
    cards, series = [], {}
    for field, title, unit in _CHARTS:
        drawn = (*records, *evaluations)
        points = [(int(record["step"]), float(record[field])) for record in drawn if record.get(field) is not None]
        if points:
            thinned = thin(points, _MOST_POINTS)
            low, high = _range([value for _, value in points])
            series[field] = {"points": thinned, "low": low, "high": high, "unit": unit}
            cards.append(_card(field, title, unit, thinned, (first, last), (low, high), marks))
    described = {str(step): reason for step, reason in marks.skipped.items()}
    block = data_block("steps-data", {"first": first, "last": last, "series": series, "skipped": described})
    return element("div", *cards, class_="charts") + _key(marks) + block


def thin(points: Points, most: int) -> Points:
    """Return at most `most` points: the least and the greatest of each stretch of steps, in order."""
    if len(points) <= most:
        return points
    size = -(-len(points) // (most // 2))
    kept: Points = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _card(
    field: str, title: str, unit: str, points: Points, steps: tuple[int, int], values: tuple[float, float], marks: Marks
) -> str:
    labels = [
        element("span", escape(figure(tick)), style=f"top:{100 * (1 - _part(tick, values)):.3f}%") for tick in ticks(*values, 4)
    ]
    below = [
        element("span", figure(tick, 6), style=f"left:{100 * _part(tick, steps):.3f}%")
        for tick in ticks(*steps, 5)
        if tick == int(tick)
    ]
    drawing = element(
        "svg",
        *_rules(values),
        *_mark_shapes(marks, steps),
        *_line(points, steps, values),
        viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title} over steps {steps[0]} to {steps[1]}: {figure(points[0][1])} to {figure(points[-1][1])}",
    )
    heading = element("h3", escape(title)) + element("output", escape(f"{figure(points[-1][1])}{unit}"), class_="now")
    plot = element("div", drawing, element("b", class_="cross"), class_="plot", data_series=field)
    return element(
        "figure",
        element("figcaption", heading),
        element("div", element("div", *labels, class_="y-axis"), plot, class_="plot-row"),
        element("div", *below, class_="x-axis"),
        class_="chart",
    )


def _line(points: Points, steps: tuple[int, int], values: tuple[float, float]) -> list[str]:
    places = [(_WIDTH * _part(step, steps), _HEIGHT * (1 - _part(value, values))) for step, value in points]
    if len(places) == 1:
        places = [(0.0, places[0][1]), (_WIDTH, places[0][1])]  # one step makes no line of its own
    path = " ".join(f"{x:.5g},{y:.5g}" for x, y in places)
    return [element("polyline", points=path, class_="curve")]


def _rules(values: tuple[float, float]) -> list[str]:
    heights = [_HEIGHT * (1 - _part(tick, values)) for tick in ticks(*values, 4)]
    return [element("line", x1=0, x2=_WIDTH, y1=y, y2=y, class_="rule") for y in heights]


def _mark_shapes(marks: Marks, steps: tuple[int, int]) -> list[str]:
    shapes = []
    for step in marks.resumed:
        x = _WIDTH * _part(step, steps)
        shapes.append(
            element("line", element("title", f"resumed before step {step}"), x1=x, x2=x, y1=0, y2=_HEIGHT, class_="resumed")
        )
    for step, reason in marks.skipped.items():
        x = _WIDTH * _part(step, steps)
        words = element("title", escape(f"step {step} skipped: {reason}"))
        shapes.append(element("line", words, x1=x, x2=x, y1=_HEIGHT - 22, y2=_HEIGHT, class_="skipped"))
    return shapes


def _key(marks: Marks) -> str:
    keys = []
    if marks.skipped:
        count = len(marks.skipped)
        word = f"{count} skipped step" + ("" if count == 1 else "s")
        keys.append(element("span", element("i", class_="k-skipped"), word, class_="key"))
    if marks.resumed:
        where = ", ".join(str(step) for step in marks.resumed[:8]) + (" …" if len(marks.resumed) > 8 else "")
        keys.append(element("span", element("i", class_="k-resumed"), f"resumed before step {where}", class_="key"))
    return element("div", *keys, class_="legend") if keys else ""


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    # Quantities that are never negative get no axis below zero.
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def _part(value: float, ends: tuple[float, float]) -> float:
    return (value - ends[0]) / (ends[1] - ends[0]) if ends[1] > ends[0] else 0.5
