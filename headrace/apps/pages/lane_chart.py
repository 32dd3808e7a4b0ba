"""The timeline of a step: a row for each lane, the plan above the measurement, on one time axis.

Bars are SVG rectangles in milliseconds, stretched to the width of the page. Names and the axis are ordinary text, so they stay
legible at any width. The page's script zooms by changing each drawing's view box.
"""

from collections.abc import Collection, Iterable

from headrace.apps.pages.markup import element, escape, figure, ticks
from headrace.apps.pages.views import Bar, StepView, in_rows, joined_bars, lane_heading, lane_place
from headrace.terms.lanes import split_lane
from headrace.terms.sizes import format_bytes

# Families of verbs; each has a colour of its own in the style sheet.
FAMILIES = {
    "forward": ("prologue", "forward", "enter", "visit", "recompute", "query", "attend", "score", "turn", "catch"),
    "backward": ("log-probs", "epilogue", "revisit", "backward", "prologue-backward"),
    "weights": ("fetch", "pull", "gather", "send", "upload", "make", "write-weights"),
    "activations": (
        *("input-out", "input-in", "hidden-out", "hidden-in", "hidden-gradient-out", "hidden-gradient-in"),
        *("cache-read", "cache-in", "cache-out", "cache-write", "query-out", "result-in"),
    ),
    "gradients": (
        *("drain", "push", "scatter", "receive", "give", "take", "gradient-out", "gradient-in", "sum-out", "sum-in"),
    ),
    "states": ("read-states", "states-to-device", "update", "states-to-host", "write-states", "round", "keep"),
    "control": ("announce", "report", "decide", "route", "commit"),
}
FAMILY_OF = {verb: family for family, verbs in FAMILIES.items() for verb in verbs}
FAMILY_WORDS = {
    "forward": "forward",
    "backward": "loss and backward",
    "weights": "weights",
    "activations": "activations",
    "gradients": "gradients",
    "states": "optimizer states and update",
    "control": "decide, commit",
}
_TRACK_HEIGHT = 16
# Neighbours of one kind that are shorter than this share of the axis are drawn as one. That is finer than a pixel, even zoomed
# a few times.
RESOLUTION = 1 / 6000


def lane_chart(measured: StepView | None, planned: StepView | None) -> str:
    """Return the chart of those views that exist; at least one must."""
    views = [(name, view) for name, view in (("planned", planned), ("measured", measured)) if view is not None]
    span = max(view.seconds for _, view in views)
    used = {bar.lane for _, view in views for bar in view.bars}
    rows = [_lane_row(lane, views, span, used) for lane in sorted(used, key=lane_place)]
    ends = "".join(_end_mark(name, view.seconds, span) for name, view in views)
    body = element("div", _grid(span), ends, *rows, _memory_row(measured, span), class_="lanes-body")
    return element(
        "div",
        element("div", *_legend({bar.verb for _, view in views for bar in view.bars}), class_="legend"),
        body,
        _axis(span),
        class_="lanes",
        id="lanes",
        data_span=span * 1e3,
    )


def _lane_row(lane: str, views: Iterable[tuple[str, StepView]], span: float, beside: Collection[str]) -> str:
    tracks, shares = [], []
    for name, view in views:
        bars = view.lane(lane)
        if split_lane(lane)[0] and not bars:
            continue  # a plan is that of one process
        busy = busy_share(bars, view.seconds)
        tracks.append(_track(name, bars, span))
        shares.append(element("span", f"{busy:.0%}", class_=f"share {name}", title=f"{name}: busy {busy:.1%} of the step"))
    return element(
        "div",
        element("div", escape(lane_heading(lane, beside)), class_="lane-name"),
        element("div", *tracks, class_="tracks"),
        element("div", *shares, class_="shares"),
        class_="lane",
    )


def _track(name: str, bars: tuple[Bar, ...], span: float) -> str:
    placed = joined_bars(in_rows(bars), span * RESOLUTION)
    rows = 1 + max((bar.row for bar in placed), default=0)
    height = _TRACK_HEIGHT / rows
    rectangles = [
        element(
            "rect",
            element("title", escape(_words(bar))),
            x=bar.start_seconds * 1e3,
            y=bar.row * height,
            width=max(bar.stop_seconds - bar.start_seconds, span * RESOLUTION / 2) * 1e3,
            height=height - (0.6 if rows > 1 else 0),
            class_=f"f-{FAMILY_OF.get(bar.verb, 'control')}",
        )
        for bar in placed
    ]
    return element(
        "svg",
        *rectangles,
        class_=f"track {name}",
        viewBox=f"0 0 {span * 1e3:.6g} {_TRACK_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{name} operations",
    )


def _words(bar: Bar) -> str:
    lines = [bar.label, f"{_milliseconds(bar.stop_seconds - bar.start_seconds)} from {_milliseconds(bar.start_seconds)}"]
    seconds = bar.stop_seconds - bar.start_seconds
    if bar.bytes:
        lines.append(format_bytes(bar.bytes) + (f", {bar.bytes / seconds / 1e9:.3g} GB/s" if seconds > 0 else ""))
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{figure(seconds * 1e3)} ms" if seconds < 1 else f"{seconds:.4g} s"


def busy_share(bars: tuple[Bar, ...], seconds: float) -> float:
    """Return the share of a step of `seconds` in which one of a lane's bars runs; the bars are in the order of their starts."""
    total = reached = 0.0
    for bar in bars:
        total += max(0.0, bar.stop_seconds - max(bar.start_seconds, reached))
        reached = max(reached, bar.stop_seconds)
    return total / seconds if seconds > 0 else 0.0


def _memory_row(view: StepView | None, span: float) -> str:
    """Return the memory in use over the step as an area; nothing if none was sampled."""
    if view is None or len(view.memory) < 2:
        return ""
    tiers = sorted({tier for _, sizes in view.memory for tier in sizes})
    rows = []
    for tier in tiers:
        samples = [(seconds * 1e3, sizes[tier]) for seconds, sizes in view.memory if tier in sizes]
        most = max(size for _, size in samples) or 1
        points = " L".join(f"{at:.6g} {40 - 38 * size / most:.4g}" for at, size in samples)
        path = element("path", d=f"M{samples[0][0]:.6g} 40 L{points} L{samples[-1][0]:.6g} 40 Z", class_="memory-area")
        drawing = element(
            "svg",
            path,
            class_="track memory",
            viewBox=f"0 0 {span * 1e3:.6g} 40",
            preserveAspectRatio="none",
            role="img",
            aria_label=f"{tier} memory in use",
        )
        rows.append(
            element(
                "div",
                element("div", f"{escape(tier.capitalize())} memory", class_="lane-name"),
                element("div", drawing, class_="tracks"),
                element("div", element("span", escape(format_bytes(most)), class_="share measured"), class_="shares"),
                class_="lane",
            )
        )
    return "".join(rows)


def _grid(span: float) -> str:
    lines = [element("i", style=f"left:{100 * tick / (span * 1e3):.4f}%") for tick in ticks(0, span * 1e3, 8)]
    return element("div", *lines, class_="grid", aria_hidden="true")


def _end_mark(name: str, seconds: float, span: float) -> str:
    """Return the line at which the step ends."""
    mark = element("i", class_=f"end {name}", style=f"left:{100 * seconds / span:.4f}%")
    return element("div", mark, class_="grid ends", aria_hidden="true", data_at=seconds * 1e3)


def _axis(span: float) -> str:
    labels = [
        element("span", axis_words(tick, span), style=f"left:{100 * tick / (span * 1e3):.4f}%")
        for tick in ticks(0, span * 1e3, 8)
    ]
    return element("div", *labels, class_="axis", id="lanes-axis")


def axis_words(milliseconds: float, span: float) -> str:
    """Return what stands below a tick of an axis of `span` seconds."""
    return f"{figure(milliseconds / 1e3)} s" if span >= 2 else f"{figure(milliseconds)} ms"


def _legend(verbs: set[str]) -> list[str]:
    families = [family for family, members in FAMILIES.items() if verbs & set(members)]
    return [
        element("span", element("i", class_=f"f-{family}"), escape(FAMILY_WORDS[family]), class_="key") for family in families
    ]
