"""The report page on made-up runs: what it says, what it draws, what it says where something is missing.

Run: pytest tests/apps/pages
"""

import errno
import fcntl
import json
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import made_machine, made_ops, write_run

from headrace.apps import read_run, summary, write_report, write_trace
from headrace.apps.pages.findings import find
from headrace.apps.pages.lane_chart import FAMILY_OF
from headrace.apps.pages.markup import data_block, decimal_bytes, element, figure, rate, ticks
from headrace.apps.pages.sentences import bottleneck_words, endurance_words, io_cpu_words
from headrace.apps.pages.step_charts import thin
from headrace.apps.pages.views import Bar, in_rows, joined_bars, lane_heading
from headrace.terms.errors import RunDirectoryError
from headrace.terms.lanes import Lane
from headrace.terms.program import Verb, Waiting

EVERY_FILE = ("metrics.jsonl", "lanes.jsonl", "timeline.json", "plan.json", "machine.json", "config.yaml")
SECTIONS = ("bottleneck", "timeline", "rates", "memory", "steps", "endurance")


def test_every_lane_has_a_name_and_every_verb_a_colour() -> None:
    assert len({lane_heading(lane) for lane in Lane}) == len(Lane)
    moves = {f"{waiting}-{verb}" for waiting in Waiting for verb in (Verb.OUT, Verb.IN)}
    assert set(FAMILY_OF) == moves | {str(verb) for verb in Verb if verb not in (Verb.OUT, Verb.IN)}


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects identities, text and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.identities: set[str] = set()
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "link"}:
            self.open.append(tag)
        self._note(attributes)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._note(attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"script", "style"}:
            self.text += data + "\n"

    def _note(self, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.identities.add(value)
            if name in {"src", "href", "action", "srcset", "data"} and value:
                self.addresses.append(value)


def page_of(directory: Path) -> Page:
    return Page(write_report(directory).read_text(encoding="utf-8"))


class TestPage:
    def test_a_complete_run_has_every_section_and_nothing_missing(self, tmp_path: Path) -> None:
        page = page_of(write_run(tmp_path / "run"))
        assert page.identities >= set(SECTIONS)
        assert "missing" not in page.text
        assert "small-model" in page.text
        assert "6 of 100" in page.text
        for lane in ("Compute", "SSD reads", "SSD writes", "Update"):
            assert lane in page.text

    def test_it_asks_the_network_for_nothing(self, tmp_path: Path) -> None:
        path = write_report(write_run(tmp_path / "run"))
        text = path.read_text(encoding="utf-8")
        assert Page(text).addresses == ["data:,"]
        assert "default-src 'none'" in text
        assert "@import" not in text
        assert "url(" not in text
        assert re.search(r"https?://", text) is None

    def test_planned_and_measured_share_one_axis(self, tmp_path: Path) -> None:
        text = write_report(write_run(tmp_path / "run")).read_text(encoding="utf-8")
        boxes = set(re.findall(r'class="track (?:planned|measured)" viewBox="0 0 ([0-9.e+]+) 16"', text))
        assert len(boxes) == 1
        assert float(boxes.pop()) == pytest.approx(1000, rel=0.01)  # the measured second, longer than the plan's step
        assert text.count('class="track planned"') == text.count('class="track measured"') > 3

    def test_skipped_steps_and_resumes_are_marked(self, tmp_path: Path) -> None:
        text = write_report(write_run(tmp_path / "run")).read_text(encoding="utf-8")
        assert "step 3 skipped: gradient norm is inf" in text
        assert "resumed before step 5" in text
        assert Page(text).text.count("1 skipped step\n") == 1

    def test_memory_over_the_plan_is_said_in_words(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run")
        assert "over the plan" not in page_of(run).text
        lines = (run / "metrics.jsonl").read_text().splitlines()
        last = json.loads(lines[-1]) | {"peak_bytes": {"host": 500 << 20}}
        (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
        # Without a GPU the device tier is host memory: 400 + 6 MiB are planned.
        assert "94 MiB over the plan" in page_of(run).text

    def test_the_cpu_cost_of_traffic_is_stated_where_it_was_counted(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run")
        assert io_cpu_words(find(read_run(run))) == []
        assert summary(read_run(run))["io_cpu_seconds_per_gigabyte"] is None
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        # The first step is left out; the others moved 3 GB each.
        changed = [line | {"io_cpu_seconds": 100.0 if line["step"] == 1 else 0.6} for line in lines]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
        words = "3 GB a step over the SSDs cost 0.6 CPU seconds, 0.2 for each GB."
        assert io_cpu_words(find(read_run(run))) == [words]
        assert words in page_of(run).text
        assert summary(read_run(run))["io_cpu_seconds_per_gigabyte"] == pytest.approx(0.2)

    @pytest.mark.parametrize("name", EVERY_FILE)
    def test_each_missing_file_is_named_and_the_rest_is_shown(self, name: str, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", without=(name,))
        page = page_of(run)
        assert page.identities >= set(SECTIONS)
        if name != "config.yaml":
            assert f"{name} is missing" in page.text
        assert any(words.startswith(f"{name} is missing") for words in summary(read_run(run))["missing"])

    @pytest.mark.parametrize("name", EVERY_FILE)
    def test_a_file_alone_is_enough_for_a_page(self, name: str, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", without=tuple(other for other in EVERY_FILE if other != name))
        if name == "machine.json":
            with pytest.raises(RunDirectoryError, match="no run directory"):
                write_report(run)
        else:
            assert page_of(run).identities >= set(SECTIONS)

    @pytest.mark.parametrize("name", EVERY_FILE)
    @pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', "\x00\x01", '{"step": 1}\nnonsense\n{"step": 2}\n'])
    def test_a_damaged_file_does_not_stop_the_rest(self, name: str, content: str, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run")
        (run / name).write_text(content)
        assert page_of(run).identities >= set(SECTIONS)

    @pytest.mark.parametrize(
        ("name", "change", "word"),
        [
            ("metrics.jsonl", {"seconds": None}, "seconds"),
            ("metrics.jsonl", {"flushed": 5}, "flushed"),
            ("metrics.jsonl", {"flushed": {"bytes_read": {}, "bytes_written": {"ssd": "x"}, "io_cpu_seconds": 0}}, "flushed"),
            ("metrics.jsonl", {"flushed": {"bytes_read": {}, "bytes_written": {}}}, "flushed"),
            ("metrics.jsonl", {"resumed": "x"}, "resumed"),
            ("metrics.jsonl", {"tokens": [1]}, "tokens"),
            ("metrics.jsonl", {"loss": "abc"}, "loss"),
            ("metrics.jsonl", {"lr": {}}, "lr"),
            ("metrics.jsonl", {"seconds": float("nan")}, "seconds"),
            ("metrics.jsonl", {"seconds": 10**400}, "seconds"),
            ("metrics.jsonl", {"bytes_written": 5}, "bytes_written"),
            ("metrics.jsonl", {"peak_bytes": {"host": "much"}}, "peak_bytes"),
            ("metrics.jsonl", {"io_cpu_seconds": "x"}, "io_cpu_seconds"),
            ("metrics.jsonl", {"io_cpu_seconds": 1, "bytes_read": None}, "bytes_read"),
            ("lanes.jsonl", {"lanes": 5}, "lanes"),
            ("lanes.jsonl", {"lanes": {"compute": {}}}, "lanes"),
            ("lanes.jsonl", {"lanes": {"compute": {"busy_seconds": 1, "idle_seconds": "x", "bytes": 0}}}, "lanes"),
            ("lanes.jsonl", {"seconds": "x"}, "seconds"),
        ],
    )
    def test_a_value_of_another_kind_becomes_a_sentence(
        self, name: str, change: dict[str, object], word: str, tmp_path: Path
    ) -> None:
        run = write_run(tmp_path / "run")
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        lines[1] |= change
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert page_of(run).identities >= set(SECTIONS)
        told = summary(read_run(run))["missing"]
        assert any(
            words.startswith(f"{name} cannot be read (") and re.search(rf"line 2(: '| has ){word}", words) for words in told
        ), told

    @pytest.mark.parametrize("step", ["x", True, None, 1])
    def test_a_step_that_is_none_becomes_a_sentence(self, step: object, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines[1]["step"] = lines[0]["step"] if step == 1 and step is not True else step
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert page_of(run).identities >= set(SECTIONS)
        told = summary(read_run(run))["missing"]
        assert any(words.startswith("metrics.jsonl cannot be read (") and "line 2: " in words for words in told), told

    @pytest.mark.parametrize("name", EVERY_FILE)
    @pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, "{}", '{"units": 5}', '{"version": 1, "steps": "x"}'])
    def test_content_that_no_run_writes_becomes_a_sentence(self, name: str, content: str, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run")
        (run / name).write_text(content)
        assert page_of(run).identities >= set(SECTIONS)

    def test_one_step_is_enough(self, tmp_path: Path) -> None:
        assert page_of(write_run(tmp_path / "run", steps=1)).identities >= set(SECTIONS)

    def test_names_from_outside_stay_text(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "a <b> & 'c'", model='/x/<script>alert("1")</script>')
        lines = (run / "metrics.jsonl").read_text().replace("gradient norm is inf", "</script><script>alert(2)</script>")
        (run / "metrics.jsonl").write_text(lines)
        text = write_report(run).read_text(encoding="utf-8")
        assert "<script>alert" not in text
        assert "a <b> & 'c'" in Page(text).text.replace("\n", "").replace("  ", " ")

    def test_no_run_is_refused_and_nothing_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(RunDirectoryError, match="no such run directory"):
            write_report(tmp_path / "nowhere")
        with pytest.raises(RunDirectoryError, match="no run directory"):
            write_report(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_a_place_that_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RunDirectoryError, match="--out"):
            write_report(write_run(tmp_path / "run"), tmp_path / "no" / "where.html")

    def test_what_was_written_of_a_report_that_failed_does_not_stay(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run, folder = write_run(tmp_path / "run"), tmp_path / "folder"
        folder.mkdir()
        with pytest.raises(RunDirectoryError, match=r"is a directory.*--out"):
            write_report(run, folder)

        def refuse(self: Path, target: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))

        monkeypatch.setattr(Path, "replace", refuse)
        with pytest.raises(RunDirectoryError, match="Input/output error"):
            write_report(run, tmp_path / "report.html")
        assert {path.name for path in tmp_path.iterdir()} == {"run", "folder"}

    @pytest.mark.parametrize("link", [False, True])
    def test_a_pipe_is_written_to_and_stays_one(self, tmp_path: Path, link: bool) -> None:
        run, pipe = write_run(tmp_path / "run"), tmp_path / "pipe"
        os.mkfifo(pipe)
        out = tmp_path / "link" if link else pipe
        if link:
            out.symlink_to(pipe)
        before = sorted(tmp_path.iterdir())
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)  # room for a whole page
            assert write_report(run, out) == out
            text = os.read(reader, 1 << 20).decode()
        finally:
            os.close(reader)
        assert text == write_report(run).read_text(encoding="utf-8")
        assert pipe.is_fifo()
        assert out.is_symlink() is link
        assert sorted(tmp_path.iterdir()) == before

    def test_a_link_to_what_has_no_path_is_written_to(self, tmp_path: Path) -> None:
        """As /dev/stdout is one, where the output goes to another program."""
        run, out = write_run(tmp_path / "run"), tmp_path / "link"
        reader, writer = os.pipe()
        try:
            fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
            out.symlink_to(f"/proc/self/fd/{writer}")
            write_report(run, out)
            assert os.read(reader, 1 << 20).startswith(b"<!doctype html>")
        finally:
            os.close(reader)
            os.close(writer)
        assert out.is_symlink()

    @pytest.mark.parametrize("exists", [True, False])
    def test_a_link_stays_one_and_what_it_leads_to_is_written(self, tmp_path: Path, exists: bool) -> None:
        run, folder = write_run(tmp_path / "run"), tmp_path / "folder"
        folder.mkdir()
        if exists:
            (folder / "real.html").write_text("old")
        (tmp_path / "link.html").symlink_to(Path("folder") / "real.html")
        assert write_report(run, tmp_path / "link.html") == tmp_path / "link.html"
        assert (tmp_path / "link.html").is_symlink()
        assert [path.name for path in folder.iterdir()] == ["real.html"]
        assert (folder / "real.html").read_text(encoding="utf-8").startswith("<!doctype html>")

    def test_out_names_the_file(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run")
        assert write_report(run, tmp_path / "x.html") == tmp_path / "x.html"
        assert not (run / "report.html").exists()


class TestFindings:
    def test_the_busiest_lane_and_who_waits_for_whom(self, tmp_path: Path) -> None:
        found = find(read_run(write_run(tmp_path / "run")))
        assert found.busiest is not None
        assert found.busiest.lane == "ssd-read"
        assert found.busiest.share == pytest.approx(0.9, abs=0.01)
        waited = [(wait.lane, wait.verb, round(wait.seconds, 3)) for wait in found.waits["compute"]]
        assert waited[0] == ("update", "update", 0.4)
        assert waited[1] == ("ssd-read", "fetch", 0.1)

    def test_words_name_the_lane_the_waits_and_the_remedy(self, tmp_path: Path) -> None:
        run = read_run(write_run(tmp_path / "run"))
        words = " ".join(bottleneck_words(find(run), run))
        # The drives share their rate, and a write follows the reads: together they are busy all the time.
        assert "limited by SSD reads and writes, which share the drives: busy for 100%" in words
        assert (
            "compute waited 500 ms of 1.0 s: 400 ms for the CPU's update kernel (update), 100 ms for SSD reads (fetch)" in words
        )
        assert "With twice as many SSDs the plan's step would take" in words

    def test_twice_what_limits_the_plan_makes_the_planned_step_shorter(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run")
        slow = made_machine(drives=[{**made_machine().drives[0].to_json(), "mixed_bytes_per_second": 2e8}])
        (run / "machine.json").write_text(json.dumps(slow.to_json()))
        found = find(read_run(run))
        assert found.forecast is not None
        ((words, seconds),) = found.doubled
        assert words == "twice as many SSDs"
        assert seconds < 0.6 * found.forecast.step_seconds

    def test_without_a_machine_profile_the_bound_comes_from_busy_times(self, tmp_path: Path) -> None:
        run = read_run(write_run(tmp_path / "run", without=("machine.json",)))
        found = find(run)
        assert found.forecast is None
        words = " ".join(bottleneck_words(found, run))
        assert "limited by SSD reads: busy for 90% of it" in words
        assert "If SSD reads were twice as fast, a step could take up to 40% less." in words

    def test_without_a_machine_profile_the_planned_lanes_are_drawn_by_usual_figures(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", without=("machine.json",))
        text = write_report(run).read_text(encoding="utf-8")
        assert text.count('class="track planned"') == text.count('class="track measured"') > 3
        assert "the planned step uses usual figures" in text
        assert "the planned step uses usual figures" not in write_report(write_run(tmp_path / "measured")).read_text("utf-8")

    def test_rates_are_bytes_over_busy_time(self, tmp_path: Path) -> None:
        rates = {rate.name: rate for rate in find(read_run(write_run(tmp_path / "run"))).rates}
        assert rates["ssd-read"].busy == pytest.approx(1.2e9 / 0.9, rel=1e-3)
        assert rates["ssd-read"].mean == pytest.approx(1.2e9, rel=1e-3)
        assert rates["ssd-read"].ceiling == 2e9
        assert rates["update"].busy == pytest.approx(26e7 / 0.5, rel=1e-3)
        assert rates["compute"].unit == "FLOP"

    def test_bytes_written_so_far_and_to_come(self, tmp_path: Path) -> None:
        found = find(read_run(write_run(tmp_path / "run")))
        assert found.written is not None
        assert found.written.so_far_bytes == 6 * 10**9
        assert found.written.forecast_bytes == 100 * 10**9
        assert found.written.wear is not None
        assert found.written.wear.share_of_rating == pytest.approx(0.1)
        assert "10%" in endurance_words(found)[2]

    def test_the_summary_is_strict_json_with_the_same_figures(self, tmp_path: Path) -> None:
        values = summary(read_run(write_run(tmp_path / "run")))
        text = json.dumps(values, allow_nan=False)
        assert json.loads(text) == values
        assert values["skipped_steps"] == [3]
        assert values["resumed_before_steps"] == [5]
        assert values["measured_peak_bytes"] == {"host": 350 << 20}
        assert values["lanes"]["compute"]["busy_share"] == pytest.approx(0.5, abs=0.01)


class TestTrace:
    def test_it_has_every_operation_on_its_lane(self, tmp_path: Path) -> None:
        entries = json.loads(write_trace(write_run(tmp_path / "run"), tmp_path / "trace.json").read_text())
        names = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
        slices = [entry for entry in entries if entry["ph"] == "X"]
        assert len(slices) == 2 * len(made_ops(1))
        assert set(names.values()) == {"compute", "ssd-read", "ssd-read 2", "ssd-write", "update"}
        assert {entry["name"] for entry in slices} >= {"fetch unit 1", "update unit 1"}
        assert all(entry["dur"] > 0 for entry in slices)
        assert sorted(entry["dur"] for entry in slices)[-1] == pytest.approx(6e5, rel=1e-3)

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
    def test_a_full_disk_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RunDirectoryError, match=r"No space left on device.*--trace"):
            write_trace(write_run(tmp_path / "run"), "/dev/full")

    def test_a_run_without_a_recording_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RunDirectoryError, match="cannot be read"):
            write_trace(write_run(tmp_path / "run", without=("timeline.json",)), tmp_path / "trace.json")


bars = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(1, 50), st.sampled_from(["fetch", "read-states"])).map(
        lambda values: Bar(
            lane="ssd-read",
            verb=values[2],
            label=values[2],
            start_seconds=float(values[0]),
            stop_seconds=float(values[0] + values[1]),
            bytes=values[1],
        )
    ),
    max_size=30,
)


@given(bars, st.integers(0, 20))
def test_rows_do_not_overlap_and_joining_loses_no_bytes(given_bars: list[Bar], resolution: int) -> None:
    placed = in_rows(given_bars)
    for row in {bar.row for bar in placed}:
        own = [bar for bar in placed if bar.row == row]
        assert all(one.stop_seconds <= other.start_seconds + 1e-5 for one, other in pairwise(own))
    fewer = joined_bars(placed, float(resolution))
    assert sum(bar.bytes for bar in fewer) == sum(bar.bytes for bar in given_bars)
    assert sum(bar.count for bar in fewer) == len(given_bars)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 9))
def test_ticks_are_few_rising_and_within_the_axis(low: float, length: float, count: int) -> None:
    high = low + length
    # An axis shorter than what floats can tell apart at its place has no ticks to speak of.
    if length > 1e-6 * abs(low):
        found = ticks(low, high, count)
        assert len(found) <= count + 2
        assert all(one < other for one, other in pairwise(found))
        assert all(low - 1e-6 * length <= tick <= high + 1e-6 * length for tick in found)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=5000))
def test_thinning_keeps_the_extremes(values: list[float]) -> None:
    points = list(enumerate(values))
    kept = thin(points, 100)
    assert len(kept) <= max(100, 2) + 2
    assert {min(values), max(values)} <= {value for _, value in kept}
    assert kept == sorted(kept)


@given(st.floats(1e-3, 1e19))
def test_figures_for_people_have_no_powers_of_ten(value: float) -> None:
    for text in (figure(value), figure(value, 4), rate(value, "B"), decimal_bytes(value)):
        assert "e+" not in text


@pytest.mark.parametrize(("value", "text"), [(7e15, "7 PB"), (999.96e9, "1 TB"), (1.2e12, "1.2 TB"), (2e21, "2000000 PB")])
def test_bytes_have_the_unit_that_fits(value: float, text: str) -> None:
    assert decimal_bytes(value) == text


def test_texts_cannot_leave_their_element() -> None:
    assert element("p", title='"><b>') == '<p title="&quot;&gt;&lt;b&gt;"></p>'
    assert "</script><" not in data_block("x", {"reason": "</script><script>"})
    assert [figure(value) for value in (0.0, 0.00312, 1e-5, 12345.0)] == ["0", "0.00312", "1e-05", "12\u2009300"]
