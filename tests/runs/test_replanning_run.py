"""A long run whose steps show that another plan is faster: when it asks, and what then says so."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training_fakes import FakeEngine, FakeHost, Screen, fake_plan, run_options

from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.search.given import load_plan
from headrace.runs import Interrupted, RunOptions, resume, train
from headrace.runs.replanning import PlanInUse
from headrace.terms.events import Notice

OTHER = replace(fake_plan(), host_slots=2)
MACHINE = replace(nominal_machine(1, host_bytes=1 << 30, device_bytes=None), name="this machine")


class SlowHost(FakeHost):
    """Engines whose steps take so many seconds, and which find such plans."""

    def __init__(self, seconds: float, *plans: Any, **more: Any) -> None:
        super().__init__(**more)
        self.seconds, self.plans = seconds, list(plans)

    def _make(self, *given: Any) -> FakeEngine:
        engine = super()._make(*given)
        engine.step_seconds, engine.other_plans = self.seconds, self.plans
        return engine


def found(plan: Any = OTHER) -> Any:
    return SimpleNamespace(plan=plan, machine=MACHINE, seconds=30.0, seconds_before=40.0)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return run_options(tmp_path, max_steps=20, cache=tmp_path / "cache")


def told(screen: Screen) -> list[str]:
    return [event.text for event in screen.events if isinstance(event, Notice) and event.text.startswith("another plan")]


def test_a_long_run_takes_another_plan_and_everything_follows(options: dict[str, Any]) -> None:
    host, screen = SlowHost(40.0, found()), Screen()
    train(RunOptions.of(options), display=screen, engines=host.engines())
    # After five steps, and after five more under the other plan; then nothing new can be known.
    assert host.made[0].asked_again == [5, 10]
    assert told(screen) == ["another plan from here: 30.0 s a step instead of 40.0 s, by the steps so far"]
    run = options["output"]
    assert load_plan(run) == OTHER
    assert json.loads((run / "machine.json").read_text())["name"] == "this machine"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["machine"], summary["measured_machine"]) == ("this machine", True)


def test_a_run_asks_once_where_its_plan_is_the_best(options: dict[str, Any]) -> None:
    host, screen = SlowHost(40.0), Screen()
    train(RunOptions.of(options), display=screen, engines=host.engines())
    assert host.made[0].asked_again == [5]
    assert told(screen) == []
    assert load_plan(options["output"]) == fake_plan()


@pytest.mark.parametrize(
    ("seconds", "more"),
    [(19.9, {}), (40.0, {"measure": False}), (299.0, {"max_steps": 6})],
    ids=["five minutes are not left", "nothing is to be measured", "one step is left"],
)
def test_a_run_does_not_ask(seconds: float, more: dict[str, Any], options: dict[str, Any]) -> None:
    host = SlowHost(seconds, found())
    train(RunOptions.of(options | more), engines=host.engines())
    assert host.made[0].asked_again == []


def test_a_run_under_a_given_plan_never_asks(options: dict[str, Any], tmp_path: Path) -> None:
    given = RunOptions.of(options | {"plan": tmp_path / "plan.json"})
    engine, account = SimpleNamespace(plan_again=lambda: pytest.fail("it asked")), SimpleNamespace(keep_plan=lambda: None)
    account.refined = lambda taken, steps_left: ""
    plans = PlanInUse(
        account,  # type: ignore[arg-type]
        engine,  # type: ignore[arg-type]
        lambda event: None,
        lambda plan, machine: account,  # type: ignore[arg-type,return-value]
        may_change=given.may_replan,
    )
    plans.after_step([40.0] * 5, steps_left=100)


def test_a_resumed_run_tells_of_the_plan_that_it_took(options: dict[str, Any]) -> None:
    host = SlowHost(60.0, found(), script={7: lambda: os.kill(os.getpid(), signal.SIGINT)})
    with pytest.raises(Interrupted):
        train(RunOptions.of(options), engines=host.engines())
    assert host.made[0].asked_again == [5]
    again, screen = SlowHost(60.0), Screen()
    resume(options["output"], display=screen, engines=again.engines())
    assert "this machine" in json.loads((options["output"] / "summary.json").read_text())["machine"]
    assert again.made[0].asked_again == [13]
