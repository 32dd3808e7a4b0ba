"""A tiny model trained by the real engine with the lanes recorded; the page of that run, read and opened in a browser.

Run: pytest tests/apps/pages
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from made_runs import made_machine, write_run
from plan_changes import changed
from transformers import AutoConfig, AutoModelForCausalLM

import headrace
from headrace.apps import read_run, summary, write_report, write_trace
from headrace.engine.trainer import Engine
from headrace.plan.value.plan import Plan
from headrace.report import MetricsFile, Reporters
from headrace.report.lanes import LanesFile, read_recording
from headrace.report.metrics import read_metrics
from headrace.terms.events import Event, OpDone, StepResult

STEPS = 5
ROWS, LENGTH = 4, 16
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

Open = Callable[..., str]


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 200, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[OpDone]]:
    """Train and return the run directory and all operations that the engine reported."""
    base = tmp_path_factory.mktemp("observed")
    config = AutoConfig.for_model(
        "llama",
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(base / "model")
    run = base / "run"
    run.mkdir()
    reporters = Reporters()
    reporters.add(MetricsFile(run / "metrics.jsonl"))
    reporters.add(LanesFile(run))

    seen: list[OpDone] = []

    def emit(event: Event) -> None:
        if isinstance(event, OpDone):
            seen.append(event)
        if not isinstance(event, StepResult):
            reporters(event)

    def on_ssd(plan: Plan) -> Plan:
        return changed(plan, resident_states=())

    with Engine.open(
        base / "model",
        headrace.Options(
            host_memory="4GiB",
            device_memory="1GiB",
            ssd=[run],
            output=base / "state",
            tokens_per_step=ROWS * LENGTH,
            sequence_length=LENGTH,
            max_grad_norm=1.0,
        ),
        sink=emit,
        adjust_plan=on_ssd,
    ) as engine:
        assert engine.plan is not None
        (run / "plan.json").write_text(json.dumps(engine.plan.to_json()))
        for index in range(STEPS):
            reporters(engine.step(batch(index)))
    reporters.close()
    (run / "machine.json").write_text(json.dumps(made_machine(has_device=False, device_memory_bytes=0).to_json()))
    return run, seen


@pytest.fixture
def trained(observed: tuple[Path, list[OpDone]]) -> Path:
    return observed[0]


def test_every_operation_of_the_engine_is_recorded(observed: tuple[Path, list[OpDone]]) -> None:
    trained, seen = observed
    lines = read_metrics(trained / "lanes.jsonl")
    metrics = read_metrics(trained / "metrics.jsonl")
    assert [line["step"] for line in lines] == [record["step"] for record in metrics] == list(range(STEPS))
    begins = {
        step: min(each.start_seconds for each in seen if (each.step, each.lane) == (step, "compute")) for step in range(STEPS)
    }
    for line in lines:
        assert line["verbs"]["forward"]["operations"] == 3
        assert line["verbs"]["backward"]["operations"] == 3
        for use in line["lanes"].values():
            assert use["busy_seconds"] + use["idle_seconds"] == pytest.approx(line["seconds"], abs=3e-6)
        if 0 < line["step"] < STEPS - 1:  # windows meet where compute goes on; the first one includes the set-up
            assert line["seconds"] == pytest.approx(begins[line["step"] + 1] - begins[line["step"]], abs=3e-6)
    # Each operation counts once, in the step in which it ended: none is lost between two steps.
    until = max(event.stop_seconds for event in seen if event.lane == "compute")
    for verb in {event.verb for event in seen}:
        ended = [event for event in seen if event.verb == verb and event.stop_seconds <= until]
        uses = [line["verbs"][verb] for line in lines if verb in line["verbs"]]
        assert sum(use["operations"] for use in uses) == len(ended)
        assert sum(use["bytes"] for use in uses) == sum(event.bytes for event in ended)
    assert any(event.verb == "read-states" for event in seen)
    recorded = read_recording(trained / "timeline.json").steps
    assert [step.step for step in recorded] == [STEPS - 2, STEPS - 1]


def test_the_page_and_the_summary_speak_of_the_run(trained: Path, tmp_path: Path) -> None:
    text = write_report(trained, tmp_path / "report.html").read_text(encoding="utf-8")
    found = summary(read_run(trained))
    assert found["bottleneck"] in found["lanes"]
    assert found["planned_step_seconds"] > 0
    for words in found["words"]:
        assert words.replace("'", "&#x27;") in text
    for lane in ("Compute", "SSD reads", "SSD writes", "Host → device", "Device → host", "Update"):
        assert f">{lane}</div>" in text
    assert 'class="track planned"' in text
    assert 'class="track measured"' in text
    assert "forward unit 1 micro 0" in text
    slices = [entry for entry in json.loads(write_trace(trained, tmp_path / "t.json").read_text()) if entry["ph"] == "X"]
    assert {entry["cat"] for entry in slices} >= {"forward", "backward", "drain", "update", "read-states", "commit"}


@pytest.fixture(scope="module")
def open_page(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Return a function that opens a page in a real browser and returns its elements after scripts have run."""
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser found (looked for {', '.join(BROWSERS)})")

    def dump(page: Path, *flags: str) -> str:
        profile = tmp_path_factory.mktemp("profile")
        command = [program, *FLAGS, f"--user-data-dir={profile}", *flags, "--dump-dom", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
        return done.stdout

    return dump


# Runs after the page's own script and leaves what it finds as attributes of the body.
PROBE = """<script>
const all = document.body.dataset;
all.resources = performance.getEntriesByType("resource").length;
all.overflow = document.documentElement.scrollWidth - innerWidth;
const track = document.querySelector("svg.track.measured");
all.bars = [...track.querySelectorAll("rect")].filter((bar) => bar.getBoundingClientRect().width > 0).length;
all.before = track.getAttribute("viewBox");
document.querySelector('[data-zoom="in"]').click();
all.zoomed = track.getAttribute("viewBox");
document.querySelector('[data-zoom="all"]').click();
all.after = track.getAttribute("viewBox");
const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
const at = {bubbles: true, clientX: box.left + box.width, clientY: box.top + 5};
plot.dispatchEvent(new PointerEvent("pointermove", at));
all.tip = document.getElementById("tip").textContent;
const bar = track.querySelector("rect"), place = bar.getBoundingClientRect();
bar.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: place.left, clientY: place.top}));
all.words = document.getElementById("tip").textContent;
const light = getComputedStyle(document.body);
all.paper = light.backgroundColor;
</script>"""
WATCH = "<script>addEventListener('error', (event) => { document.documentElement.dataset.error = event.message; });</script>"


def probed(page: Path, out: Path) -> Path:
    text = page.read_text(encoding="utf-8")
    out.write_text(text.replace("<title>", WATCH + "<title>", 1).replace("</body>", PROBE + "</body>"), encoding="utf-8")
    return out


def attribute(dom: str, name: str) -> str:
    found = re.search(rf'data-{name}="([^"]*)"', dom[dom.index("<body") :])
    assert found is not None, f"data-{name}: the page's script has not run"
    return found[1]


def test_a_browser_shows_it_zooms_and_tells(trained: Path, tmp_path: Path, open_page: Open) -> None:
    page = probed(write_report(trained, tmp_path / "report.html"), tmp_path / "probed.html")
    dom = open_page(page, "--window-size=1200,900", "--host-resolver-rules=MAP * ~NOTFOUND")
    assert "data-error" not in dom
    assert attribute(dom, "resources") == "0"
    assert int(attribute(dom, "overflow")) <= 0
    assert int(attribute(dom, "bars")) > 3
    width = [float(attribute(dom, moment).split()[2]) for moment in ("before", "zoomed", "after")]
    assert width[1] == pytest.approx(width[0] / 2)
    assert width[2] == pytest.approx(width[0])
    assert attribute(dom, "tip").startswith(f"step {STEPS - 1}: ")
    assert "unit" in attribute(dom, "words")
    assert 'class="tools"' in dom
    assert 'hidden="hidden"' not in dom


def test_a_narrow_window_needs_no_sideways_scrolling(tmp_path: Path, open_page: Open) -> None:
    page = probed(write_report(write_run(tmp_path / "run")), tmp_path / "probed.html")
    frame = tmp_path / "phone.html"
    inner = page.read_text(encoding="utf-8").replace("&", "&amp;").replace('"', "&quot;")
    # A headless window is 500 wide at least; a frame can be as narrow as a phone. It reports through its title attribute.
    frame.write_text(
        f'<body><iframe id="phone" style="width:390px;height:900px" srcdoc="{inner}"></iframe><script>'
        'addEventListener("load", () => { const seen = document.getElementById("phone").contentDocument;'
        "document.body.dataset.overflow = seen.documentElement.scrollWidth - 390;"
        "document.body.dataset.step = seen.body.dataset.tip; });</script>"
    )
    dom = open_page(frame)
    assert int(attribute(dom, "overflow")) <= 0
    assert attribute(dom, "step").startswith("step 6: ")


def test_a_dark_desktop_gets_a_dark_page(tmp_path: Path, open_page: Open) -> None:
    page = probed(write_report(write_run(tmp_path / "run")), tmp_path / "probed.html")
    light, dark = (
        [int(part) for part in re.findall(r"\d+", attribute(open_page(page, *flags), "paper"))[:3]]
        for flags in ((), ("--force-dark-mode",))
    )
    assert min(light) > 200
    assert max(dark) < 60
