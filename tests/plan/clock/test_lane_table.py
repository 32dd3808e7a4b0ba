"""A lane is a row of one table: with a row more, the simulator, the trace and the pages know it, and nothing else changes."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from machines import machine

from headrace.apps.pages.lane_chart import lane_chart
from headrace.apps.pages.sentences import lane_words
from headrace.apps.pages.views import measured_view, planned_view
from headrace.flow.run.execute import OverlappedInterpreter
from headrace.machine.cpu import CpuMachine
from headrace.plan.clock.simulate import simulate
from headrace.report.lanes import LanesFile, read_recording
from headrace.report.trace_file import TraceFile
from headrace.terms.events import OpDone
from headrace.terms.lanes import Hardware, Lane, LaneRow, LaneShare, lane_named
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Op, Program, Verb


@dataclass(frozen=True, kw_only=True)
class WithRadio(Ceilings):
    """A profile that has measured a radio, too."""

    radio_bytes_per_second: float
    air_bytes_per_second: float


@pytest.fixture
def radio(monkeypatch: pytest.MonkeyPatch) -> Lane:
    """Add the row `radio` to the table."""
    row = LaneRow(
        heading="Radio",
        words="sending by radio",
        rate="radio_bytes_per_second",
        overhead="transfer_seconds",
        shares=LaneShare("air", "air_bytes_per_second"),
        part=Hardware("radio", "a radio twice as fast", ("radio_bytes_per_second", "air_bytes_per_second")),
        on_bus=True,
        threads=2,
    )
    lane = Lane.__new_member__(Lane, "radio", row)  # type: ignore[attr-defined]
    lane._name_ = "RADIO"
    monkeypatch.setitem(Lane._member_map_, "RADIO", lane)
    monkeypatch.setitem(Lane._value2member_map_, "radio", lane)
    monkeypatch.setattr(Lane, "_member_names_", [*Lane._member_names_, "RADIO"])
    return lane


def profile() -> WithRadio:
    base = machine(memory=1e12, read=2e9)
    values = {field.name: getattr(base, field.name) for field in fields(Ceilings)}
    return WithRadio(**values, radio_bytes_per_second=1e9, air_bytes_per_second=1e9)


def step(lane: Lane) -> Program:
    read = Op(index=0, verb=Verb.FETCH, lane=Lane.SSD_READ, bytes=4 * 10**9)
    return Program((read, Op(index=1, verb=Verb.DRAIN, lane=lane, bytes=3 * 10**9, after=(0,))))


def test_the_simulator_gives_a_new_lane_its_rate_and_finds_that_it_limits(radio: Lane) -> None:
    found = simulate([step(radio)] * 3, profile())
    assert found.lanes[radio].alone_seconds == pytest.approx(3.0, rel=1e-3)
    assert found.step_seconds == pytest.approx(3.0, rel=1e-2)
    assert found.bottleneck is radio
    assert "limited by sending by radio" in found.explanation


def test_an_interpreter_serves_a_new_lane(radio: Lane) -> None:
    interpreter, served = OverlappedInterpreter(CpuMachine()), []
    try:
        interpreter.run(step(radio), lambda op: served.append(op.lane), 0).wait()
    finally:
        interpreter.close()
    assert served == [Lane.SSD_READ, radio]


def test_traces_and_pages_name_a_new_lane(radio: Lane, tmp_path: Path) -> None:
    done = [
        OpDone(
            step=number,
            label="drain",
            verb=Verb.DRAIN,
            lane=lane,
            unit=1,
            micro=-1,
            chunk=-1,
            start_seconds=number + 0.1,
            stop_seconds=number + 0.9,
            bytes=7,
        )
        for number in range(2)
        for lane in (radio, Lane.COMPUTE)
    ]
    trace, lanes = TraceFile(tmp_path / "trace.json"), LanesFile(tmp_path)
    for event in done:
        trace(event)
        lanes(event)
    trace.close()
    lanes.close()
    threads = {entry["tid"]: entry["args"] for entry in json.loads((tmp_path / "trace.json").read_text()) if "tid" in entry}
    assert sorted(threads) == [0, 100 * list(Lane).index(radio)]
    assert lane_words("radio") == "sending by radio"
    page = lane_chart(
        measured_view(read_recording(tmp_path / "timeline.json")), planned_view(simulate([step(radio)] * 3, profile()))
    )
    assert page.index("Compute") < page.index("Radio")


def test_a_lane_of_another_version_keeps_its_name() -> None:
    assert lane_named("radio") is None
    assert lane_words("radio") == "radio"
    assert lane_named("ssd-read") is Lane.SSD_READ


def test_what_is_bought_for_a_lane_is_known_of_its_row(radio: Lane) -> None:
    """Of every lane but commits, which are the drives' work, and waiting for routers; and all of a part's figures are doubled,
    drives in number.
    """
    known = profile()
    assert [lane for lane in Lane if lane.row.part is None] == [Lane.ROUTER, Lane.COMMIT]
    for part in {lane.row.part for lane in Lane if lane.row.part}:
        more = known.with_twice(part)
        for name in part.figures:
            before, after = getattr(known, name), getattr(more, name)
            if name == "drives":
                assert len(after) == 2 * len(before)
            elif name == "flops_per_second":
                assert after == {dtype: 2 * rate for dtype, rate in before.items()}
            elif name == "device_memory_bytes_per_second":
                assert after == 2 * known.device_update_bytes_per_second
            elif name == "attended_bytes_per_second":
                assert after == 2 * known.attention_bytes_per_second
            else:
                assert after == 2 * before
        same = {each.name for each in fields(known)} - set(part.figures)
        assert all(getattr(more, name) == getattr(known, name) for name in same)
    assert radio.row.part is not None
    faster = known.with_twice(radio.row.part)
    seconds = [simulate([step(radio)] * 3, each).step_seconds for each in (known, faster)]
    assert seconds == pytest.approx([3.0, 2.0], rel=1e-2)  # the reads limit it then
