"""Trackers get what TensorBoard gets; doubles stand for their libraries. Run: pytest tests/runs/test_trackers.py"""

import sys
from types import SimpleNamespace

import pytest

from headrace.report.trackers import TRACKERS, Tracker
from headrace.terms.errors import ConfigError
from headrace.terms.events import Evaluated
from headrace.terms.options.run_options import RunOptions

EVALUATED = Evaluated(step=3, loss=1.5, tokens=7, seconds=0.25)
SCALARS = {"eval/loss": 1.5, "eval/seconds": 0.25}


class Library(SimpleNamespace):
    """A module that writes down what is called, and fails in `broken`."""

    def __init__(self, broken=None):
        super().__init__(calls=[], broken=broken)

    def __getattr__(self, name):
        def called(*given, **more):
            if name == self.broken:
                raise RuntimeError("no space\nleft")
            self.calls.append((name, *given, more))

        return called


def reported(monkeypatch, kind, library):
    monkeypatch.setitem(sys.modules, kind, library)
    said = []
    tracker = Tracker(kind, "mine", {"seed": 3}, say=said.append)
    tracker(EVALUATED)
    tracker(EVALUATED)
    tracker.close()
    tracker.close()
    return said


@pytest.mark.parametrize("kind", ["trackio", "wandb"])
def test_libraries_of_wandbs_form_get_init_log_and_finish(monkeypatch, kind):
    library = Library()
    assert reported(monkeypatch, kind, library) == []
    begun = {"project": "headrace", "name": "mine", "config": {"seed": 3}, "resume": "allow"}
    assert library.calls == [("init", begun), *[("log", SCALARS, {"step": 3})] * 2, ("finish", {})]


def test_mlflow_gets_a_run_its_parameters_and_metrics(monkeypatch):
    library = Library()
    assert reported(monkeypatch, "mlflow", library) == []
    begun = [("start_run", {"run_name": "mine"}), ("log_params", {"seed": "3"}, {})]
    assert library.calls == [*begun, *[("log_metrics", SCALARS, {"step": 3})] * 2, ("end_run", {})]


@pytest.mark.parametrize(("kind", "broken"), [("trackio", "log"), ("wandb", "finish"), ("mlflow", "log_metrics")])
def test_a_tracker_that_fails_is_said_once_and_left(monkeypatch, kind, broken):
    (words,) = reported(monkeypatch, kind, Library(broken))
    assert words.startswith(f"{kind} gets no more figures of this run: RuntimeError: no space")


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_tracker_that_is_missing_or_cannot_begin_is_refused_with_what_to_do(monkeypatch, kind):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(ConfigError, match=f"its package is missing; run `pip install {kind}`"):
        Tracker(kind, "mine", {}, say=print)
    monkeypatch.setitem(sys.modules, kind, Library("start_run" if kind == "mlflow" else "init"))
    with pytest.raises(ConfigError, match=f"report_to: {kind} could not begin"):
        Tracker(kind, "mine", {}, say=print)


def test_none_is_asked_for_unless_named():
    assert RunOptions(model="m", data="d").report_to == ()
    assert RunOptions(model="m", data="d", report_to=TRACKERS, run_name="x").report_to == TRACKERS
