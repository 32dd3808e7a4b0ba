"""The page: one HTML file with style, script and drawings inside, which loads nothing from the network.

Invariant: every report has each section; where a section cannot show something, it says what would provide it.
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from headrace.apps.pages.findings import Findings, find
from headrace.apps.pages.gauges import memory_bars, rate_gauges, recorded_peaks
from headrace.apps.pages.lane_chart import lane_chart
from headrace.apps.pages.markup import decimal_bytes, element, escape, figure
from headrace.apps.pages.run_files import MACHINE_NAME, METRICS_NAME, RunFiles, read_run
from headrace.apps.pages.sentences import bottleneck_words, endurance_words, io_cpu_words
from headrace.apps.pages.step_charts import Marks, step_charts
from headrace.files.durable import write_whole
from headrace.plan.value.results import PLAN_NAME
from headrace.plan.value.words import explain_plan
from headrace.report.lanes import LANES_NAME, TIMELINE_NAME
from headrace.report.metrics import best_of
from headrace.terms.errors import RunDirectoryError
from headrace.terms.sizes import format_seconds

REPORT_NAME = "report.html"
# Tells the browser, whatever the page contains, to load nothing from anywhere.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
# A live page also asks who serves it for news.
_LIVE_POLICY = f"{_POLICY}; connect-src 'self'"


def write_report(run_directory: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run and return its path (default: `report.html` in the run directory).

    Raises:
        RunDirectoryError: there is no such run directory, nothing of a run is in it, or the file cannot be written.
    """
    run = read_run(run_directory)
    path = Path(out) if out is not None else run.directory / REPORT_NAME
    if path.is_dir():
        raise RunDirectoryError(f"report: {path} is a directory; give a file with --out")
    page = render(run, find(run))
    try:
        write_whole(path, page)
    except OSError as error:
        raise RunDirectoryError(f"report: {path} cannot be written ({error.strerror}); give another file with --out") from error
    return path


def render(run: RunFiles, found: Findings, *, stamp: str | None = None) -> str:
    """Return the page of a run as a text. With a `stamp` it is live, and asks for a page with another one."""
    sections = [_bottleneck(run, found), _timeline(run, found), _rates(run, found), _memory(run), _steps(run), _wear(found)]
    about = "Drawn by Headrace from the files of the run directory."
    return page_of(_name(run), _header(run, found), sections, about, stamp=stamp, finished=run.finished)


def render_plan(run: RunFiles, found: Findings) -> str:
    """Return the page of a plan without a run: `run` has the plan, `found` its simulation."""
    sections = [_bottleneck(run, found), _timeline(run, found), _memory(run)]
    return page_of(_name(run), _header(run, found), sections, "Drawn by Headrace from a plan; nothing was run.")


def page_of(
    name: str, header: str, sections: Sequence[str], about: str, *, stamp: str | None = None, finished: bool = False
) -> str:
    """Return a page as a text."""
    title, policy = f"{name} · Headrace", _POLICY if stamp is None else _LIVE_POLICY
    head = element(
        "head",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        element("title", escape(title)),
        f"<style>{_resource('page.css')}</style>",
    )
    body = element(
        "body",
        element("p", id="live", role="status") if stamp is not None else "",
        header,
        element("main", *sections),
        element("footer", about),
        f"<script>{_resource('page.js')}</script>",
        f"<script>{_resource('live.js')}</script>" if stamp is not None else "",
        data_stamp=stamp,
        data_finished="yes" if finished else "",
    )
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def _resource(name: str) -> str:
    return files("headrace.apps.pages").joinpath(name).read_text(encoding="utf-8")


def _name(run: RunFiles) -> str:
    return run.directory.resolve().name


def _header(run: RunFiles, found: Findings) -> str:
    lines = []
    options, plan = run.options or {}, run.plan
    if model := options.get("model"):
        lines.append(f"{Path(str(model)).name}")
    if plan is not None:
        billions = plan.num_parameters / 1e9
        size = f"{figure(billions)} B" if billions >= 0.1 else f"{plan.num_parameters / 1e6:.3g} M"
        lines.append(f"{size} parameters, {plan.num_blocks} blocks, {plan.compute_dtype}")
        lines.append(f"{figure(plan.batch.tokens_per_step, 6)} tokens a step")
    if run.ceilings is not None:
        lines.append(f"on {run.ceilings.name}")
    facts = element("p", escape(" · ".join(lines)), class_="facts") if lines else ""
    summary = element("details", element("summary", "The plan"), element("pre", escape(explain_plan(plan)))) if plan else ""
    return element("header", element("h1", escape(_name(run))), facts, _tiles(run, found), summary or _missing(run, PLAN_NAME))


def _tiles(run: RunFiles, found: Findings) -> str:
    tiles = []
    if run.metrics:
        last = run.metrics[-1]
        of = f" of {run.total_steps}" if run.total_steps else ""
        tiles.append(("steps", f"{last['step']}{of}"))
        if last.get("loss") is not None:
            tiles.append(("last loss", figure(last["loss"], 4)))
        if (best := best_of(run.evaluations)) is not None:
            tiles.append(("best eval loss", f"{figure(best['eval_loss'], 4)} (step {best['step']})"))
        tiles.append(("tokens", figure(sum(record["tokens"] for record in run.metrics), 4)))
        seconds = sum(float(record["seconds"]) for record in run.metrics)
        tiles.append(("time in steps", format_seconds(seconds)))
    if (left := seconds_left(run, found)) is not None:
        tiles.append(("time left", format_seconds(left)))
    if found.step_seconds is not None:
        tiles.append(("a step", format_seconds(found.step_seconds)))
    if found.written is not None:
        tiles.append(("written", decimal_bytes(found.written.so_far_bytes)))
    return element(
        "dl", *(element("div", element("dt", name), element("dd", escape(value))) for name, value in tiles), class_="tiles"
    )


def seconds_left(run: RunFiles, found: Findings) -> float | None:
    """Return about how long the steps take that are left; None if that is unknown, or none are."""
    done = int(run.metrics[-1]["step"]) if run.metrics else 0
    if run.finished or run.total_steps is None or found.step_seconds is None or done >= run.total_steps:
        return None
    return (run.total_steps - done) * found.step_seconds


def _section(identity: str, title: str, *content: str, lead: str = "") -> str:
    about = element("p", escape(lead), class_="lead") if lead else ""
    return element("section", element("h2", escape(title)), about, *content, id=identity)


def _missing(run: RunFiles, *names: str) -> str:
    return "".join(element("p", escape(run.missing[name]), class_="missing") for name in names if name in run.missing)


def _sentences(sentences: list[str], *, first_class: str) -> str:
    return "".join(
        element("p", escape(words), class_=first_class if not index else "finding") for index, words in enumerate(sentences)
    )


def _bottleneck(run: RunFiles, found: Findings) -> str:
    sentences = bottleneck_words(found, run)
    return _section(
        "bottleneck",
        "What limits the run",
        _sentences(sentences, first_class="finding first"),
        _missing(run, LANES_NAME, MACHINE_NAME),
    )


def _timeline(run: RunFiles, found: Findings) -> str:
    if found.measured is None and found.planned is None:
        return _section("timeline", "A step, lane by lane", _missing(run, TIMELINE_NAME, PLAN_NAME, MACHINE_NAME))
    notes = [_missing(run, TIMELINE_NAME)]
    if found.planned is None:
        words = "The planned step is left out: simulating it needs plan.json, and a figure of the machine for the plan's dtype."
        notes.append(element("p", words, class_="missing"))
    elif found.forecast is None:
        words = "This machine was not measured: the planned step uses usual figures, and only its proportions mean something."
        notes.append(element("p", words, class_="note"))
    if run.on_gpu and found.measured is not None:
        words = "On a GPU, times of compute and copies are those at which the host issued the work and saw it go on."
        notes.append(element("p", words, class_="note"))
    parts = [
        f"{name} {format_seconds(view.seconds)}"
        for name, view in (("planned", found.planned), ("measured", found.measured))
        if view
    ]
    step = f"step {found.measured.step}, " if found.measured is not None else ""
    buttons = "".join(
        element("button", words, type="button", data_zoom=name, title=title)
        for name, words, title in (
            ("in", "+", "closer"),
            ("out", "−", "farther"),
            ("left", "←", "earlier"),
            ("right", "→", "later"),
            ("all", "whole step", "show the whole step"),
        )
    )
    tools = element(
        "div", buttons, element("span", "drag over the lanes to look closer", class_="hint"), class_="tools", hidden="hidden"
    )
    order = " Of each lane, planned above measured." if len(parts) == 2 else ""
    return _section(
        "timeline",
        "A step, lane by lane",
        tools,
        lane_chart(found.measured, found.planned),
        *notes,
        lead=f"{step}{', '.join(parts)}.".capitalize()
        + order
        + " At the right, the share of the step for which the lane is busy.",
    )


def _rates(run: RunFiles, found: Findings) -> str:
    lead = "Filled: the rate while the lane is busy. Tick: the mean over a whole step."
    lead += " Line: the machine's ceiling." if run.ceilings is not None else ""
    content = rate_gauges(found.rates)
    return _section(
        "rates",
        "Rates against their ceilings",
        content,
        _sentences(io_cpu_words(found), first_class="finding"),
        _missing(run, LANES_NAME, MACHINE_NAME),
        lead=lead if content else "",
    )


def _memory(run: RunFiles) -> str:
    content = memory_bars(run.plan, recorded_peaks(run.metrics))
    return _section("memory", "Memory, planned and measured", content, _missing(run, PLAN_NAME, METRICS_NAME))


def _steps(run: RunFiles) -> str:
    if not run.metrics:
        none = element("p", "No step is recorded yet.", class_="missing")
        return _section("steps", "Steps", _missing(run, METRICS_NAME) or none)
    marks = Marks(
        skipped={int(record["step"]): str(record["skipped"]) for record in run.metrics if "skipped" in record},
        resumed=tuple(int(record["step"]) for record in run.lanes if record.get("resumed")),
    )
    return _section("steps", "Steps", step_charts(run.metrics, marks, run.evaluations))


def _wear(found: Findings) -> str:
    sentences = endurance_words(found)
    if not sentences:
        return _section("endurance", "SSD endurance", element("p", "No step is recorded yet.", class_="missing"))
    known = found.written is not None and found.written.wear is not None
    note = (
        ""
        if known
        else element("p", "The share of the rated endurance needs machine.json, the machine's profile.", class_="missing")
    )
    bar = ""
    if found.written is not None and found.written.wear is not None:
        share = found.written.wear.share_of_rating
        fill = element(
            "span", class_="bar rate" if share <= 1 else "bar measured over", style=f"width:{100 * min(1.0, share):.3f}%"
        )
        bar = element("div", fill, class_="rail", title=f"{share:.2%} of the rated endurance")
    return _section("endurance", "SSD endurance", _sentences(sentences, first_class="finding"), bar, note)
