"""A step's lanes as one SVG file: the chart of the page, with its own colours on white, for documents and slides.

Invariant: colours are those of the page's style sheet, read from it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from headrace.apps.pages.findings import find
from headrace.apps.pages.lane_chart import FAMILIES, FAMILY_OF, FAMILY_WORDS, RESOLUTION, axis_words, busy_share
from headrace.apps.pages.markup import element, escape, ticks
from headrace.apps.pages.run_files import read_run
from headrace.apps.pages.views import Bar, StepView, in_rows, joined_bars, lane_heading, lane_place
from headrace.files.durable import write_whole
from headrace.report.lanes import TIMELINE_NAME
from headrace.terms.errors import RunDirectoryError
from headrace.terms.sizes import format_seconds

# Pixels: where bars begin and end, the height of a lane and of its bars, the places of title and legend.
_LEFT, _WIDTH, _RIGHT = 150.0, 760.0, 50.0
_TOP, _LANE, _TRACK, _BOTTOM = 62.0, 26.0, 18.0, 26.0
_FONT = "ui-sans-serif, system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"


def write_picture(run_directory: str | Path, out: str | Path) -> Path:
    """Write the newest recorded step of a run, else the planned one, as an SVG file and return its path.

    Raises:
        RunDirectoryError: the run has neither, or the file cannot be written.
    """
    run, path = read_run(run_directory), Path(out)
    found = find(run)
    view = found.measured or found.planned
    if view is None:
        raise RunDirectoryError(
            f"svg: {run.directory} has no step to draw: {run.missing.get(TIMELINE_NAME, 'none is recorded')}"
        )
    try:
        write_whole(path, picture(view))
    except OSError as error:
        raise RunDirectoryError(f"svg: {path} cannot be written ({error.strerror}); give another file with --svg") from error
    return path


def picture(view: StepView) -> str:
    """Return one step as the text of an SVG file."""
    lanes = sorted({bar.lane for bar in view.bars}, key=lane_place)
    body = _TOP + _LANE * len(lanes)
    width, height = _LEFT + _WIDTH + _RIGHT, body + _BOTTOM
    hues = _hues()
    title = "A planned step" if view.step is None else f"Step {view.step}, as measured"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="{_FONT}" font-size="13">',
            element("title", escape(title)),
            element("rect", width=width, height=height, fill="#ffffff"),
            element("text", escape(f"{title}: {format_seconds(view.seconds)}"), x=8, y=20, font_weight="600", fill=hues["ink"]),
            *_legend({bar.verb for bar in view.bars}, hues),
            *_axis(view.seconds, body, hues),
            *(line for row, lane in enumerate(lanes) for line in _lane(lane, view, _TOP + _LANE * row, hues, lanes)),
            "</svg>\n",
        )
    )


def _hues() -> dict[str, str]:
    """Return the colours of the page on light paper, by their names in the style sheet."""
    text = files("headrace.apps.pages").joinpath("page.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", text.split("@media", 1)[0]))


def _legend(verbs: set[str], hues: dict[str, str]) -> Iterator[str]:
    left = 8.0
    for family, members in FAMILIES.items():
        if verbs & set(members):
            words = FAMILY_WORDS[family]
            yield element("rect", x=left, y=34.0, width=11, height=11, rx=2, fill=hues[family])
            yield element("text", escape(words), x=left + 16, y=44.0, fill=hues["soft"])
            left += 34 + 6.8 * len(words)


def _axis(seconds: float, bottom: float, hues: dict[str, str]) -> Iterator[str]:
    for tick in ticks(0, seconds * 1e3, 8):
        x = _LEFT + _WIDTH * tick / (seconds * 1e3)
        yield element("line", x1=x, x2=x, y1=_TOP, y2=bottom, stroke=hues["rule"])
        yield element("text", axis_words(tick, seconds), x=x, y=bottom + 17, text_anchor="middle", fill=hues["soft"])


def _lane(lane: str, view: StepView, top: float, hues: dict[str, str], beside: Sequence[str]) -> Iterator[str]:
    bars = view.lane(lane)
    middle = top + _LANE / 2 + 4.5
    yield element("text", escape(lane_heading(lane, beside)), x=8, y=middle, fill=hues["ink"])
    yield from _bars(joined_bars(in_rows(bars), view.seconds * RESOLUTION), view.seconds, top, hues)
    share = f"{busy_share(bars, view.seconds):.0%}"
    yield element("text", share, x=_LEFT + _WIDTH + 44, y=middle, text_anchor="end", fill=hues["soft"])


def _bars(bars: Iterable[Bar], seconds: float, top: float, hues: dict[str, str]) -> Iterator[str]:
    placed = tuple(bars)
    rows = 1 + max((bar.row for bar in placed), default=0)
    height = _TRACK / rows
    for bar in placed:
        yield element(
            "rect",
            x=_LEFT + _WIDTH * bar.start_seconds / seconds,
            y=top + (_LANE - _TRACK) / 2 + bar.row * height,
            width=max(0.3, _WIDTH * (bar.stop_seconds - bar.start_seconds) / seconds),
            height=height - (0.6 if rows > 1 else 0),
            fill=hues[FAMILY_OF.get(bar.verb, "control")],
        )
