"""Memory per tier as stacked bars, planned above measured; and rates as gauges with their ceilings.

Invariant: bars of one tier share one scale, so that a measured bar longer than the planned one shows an excess.
"""

from collections.abc import Mapping, Sequence

from headrace.apps.pages.findings import MeasuredRate
from headrace.apps.pages.markup import element, escape, rate
from headrace.apps.pages.views import lane_heading
from headrace.plan.value.plan import Plan
from headrace.report.metrics import Record
from headrace.terms.sizes import format_bytes

_TIER_WORDS = {"device": "Device memory", "host": "Host memory", "ssd": "SSD space"}
_FAMILY_OF_PURPOSE = {
    "weights": "weights",
    "states": "states",
    "gradients": "gradients",
    "activations": "activations",
    "stash": "activations",
    "workspace": "forward",
}


def recorded_peaks(records: Sequence[Record]) -> dict[str, int]:
    """Return the greatest recorded peak per tier."""
    peaks: dict[str, int] = {}
    for record in records:
        for tier, size in record.get("peak_bytes", {}).items():
            peaks[tier] = max(peaks.get(tier, 0), int(size))
    return peaks


def memory_bars(plan: Plan | None, measured: Mapping[str, int]) -> str:
    """Return a card for each tier that is planned or measured.

    Without a GPU the device tier is a part of the process's memory, so it counts in the host's plan here.
    """
    planned = plan.results.peak_bytes if plan is not None else {}
    allowed = plan.results.allowed_bytes if plan is not None else {}
    if plan is not None and plan.separate_device and measured and "device" not in measured:
        host = planned.get("host", {}) | {"device tier (no GPU)": plan.peak("device")}
        planned = {tier: rows for tier, rows in planned.items() if tier != "device"} | {"host": host}
        allowed = allowed | {"host": allowed["host"] + allowed.get("device", 0)} if "host" in allowed else allowed
    tiers = [tier for tier in (*planned, *measured) if planned.get(tier) or measured.get(tier)]
    return "".join(_tier(tier, planned.get(tier, {}), measured.get(tier), allowed.get(tier)) for tier in dict.fromkeys(tiers))


def _tier(tier: str, rows: Mapping[str, int], measured: int | None, allowed: int | None) -> str:
    rows = {name: size for name, size in sorted(rows.items(), key=lambda row: -row[1]) if size}
    planned = sum(rows.values())
    scale = 1.02 * max(planned, measured or 0, allowed or 0)
    parts = [_stack(rows, scale)] if rows else [element("p", "No plan to compare with.", class_="missing")]
    found = element("p", "not measured", class_="missing")
    if measured is not None:
        over = " over" if rows and measured > planned else ""
        found = element("span", class_=f"bar measured{over}", style=f"width:{100 * measured / scale:.3f}%")
    limit = element("i", class_="limit", style=f"left:{100 * allowed / scale:.3f}%", title="allowed") if allowed else ""
    about = f"{format_bytes(allowed)} allowed" if allowed else ""
    excess = measured - planned if rows and measured else 0
    warning = element("p", f"{format_bytes(excess)} over the plan", class_="alarm") if excess > 0 else ""
    keys = [
        element("span", element("i", class_=f"f-{_family(name)}"), escape(f"{name} {format_bytes(size)}"), class_="key")
        for name, size in rows.items()
    ]
    return element(
        "div",
        element("h3", escape(_TIER_WORDS.get(tier, tier)) + element("small", escape(about))),
        _labelled("planned", element("div", *parts, limit, class_="rail"), format_bytes(planned) if rows else "–"),
        _labelled("measured", element("div", found, limit, class_="rail"), format_bytes(measured) if measured else "–"),
        warning,
        element("div", *keys, class_="legend"),
        class_="tier",
    )


def _stack(rows: Mapping[str, int], scale: float) -> str:
    pieces = [
        element(
            "span",
            class_=f"bar f-{_family(name)}",
            style=f"width:{100 * size / scale:.3f}%",
            title=f"{name}: {format_bytes(size)}",
        )
        for name, size in rows.items()
    ]
    return "".join(pieces)


def _family(purpose: str) -> str:
    return _FAMILY_OF_PURPOSE.get(purpose.partition(",")[0], "control")


def rate_gauges(rates: Sequence[MeasuredRate]) -> str:
    """Return a gauge for each rate: filled to the rate while busy, a tick at the mean over the step, full at the ceiling."""
    most = {
        unit: max((each.busy for each in rates if each.unit == unit), default=1.0) for unit in {each.unit for each in rates}
    }
    names = [each.name for each in rates]
    return "".join(_gauge(each, most[each.unit], names) for each in rates)


def _gauge(each: MeasuredRate, most: float, beside: Sequence[str]) -> str:
    scale = max(each.ceiling, each.busy) * 1.02 if each.ceiling else most * 1.02
    fill = element("span", class_="bar rate", style=f"width:{100 * each.busy / scale:.3f}%", title="while busy")
    mean = element("i", class_="mean", style=f"left:{100 * each.mean / scale:.3f}%", title="mean over the step")
    limit = (
        element("i", class_="limit", style=f"left:{100 * each.ceiling / scale:.3f}%", title="ceiling") if each.ceiling else ""
    )
    words = rate(each.busy, each.unit)
    if each.ceiling:
        words += f" · {each.busy / each.ceiling:.0%} of {rate(each.ceiling, each.unit)}"
    about = element("small", escape(f"{rate(each.mean, each.unit)} over the step"))
    name = lane_heading(each.name, beside)
    return element(
        "div",
        element("div", element("b", escape(name)), element("span", escape(words)), about, class_="gauge-words"),
        element("div", fill, mean, limit, class_="rail"),
        class_="gauge",
    )


def _labelled(name: str, content: str, words: str) -> str:
    return element(
        "div",
        element("span", name, class_="rail-name"),
        content,
        element("span", escape(words), class_="rail-words"),
        class_="rail-row",
    )
