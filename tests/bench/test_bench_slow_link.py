"""Slow links: the double takes the declared time, figures follow from what was noted, and who is not root is told so."""

import sys
from types import SimpleNamespace

import pytest
import slow_link

from headrace.peers.node.links import Link, Network
from headrace.plan.clock.rates import roofline_seconds
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Verb


def test_the_double_takes_as_long_as_declared_and_only_where_it_computes(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr(slow_link.time, "monotonic", lambda: 7.0)
    monkeypatch.setattr(slow_link.time, "sleep", slept.append)
    done: list[Op] = []
    double = slow_link.Double(slow_link.profiles(2e9)[0])
    perform = double.slow(lambda state, op: done.append(op))
    state = SimpleNamespace(verdict=SimpleNamespace(step=3))
    for lane in (Lane.COMPUTE, Lane.NIC_UP):
        perform(state, Op(0, Verb.FORWARD, lane, flops=1e9))
    assert len(done) == 2
    assert slept == [pytest.approx(roofline_seconds(1e9, 2e9))]
    assert double.noted == [(3, 7.0, 0.0, slept[0])]


def test_figures_are_medians_and_the_hidden_share_is_of_the_smaller():
    # Five steps of 10 s, with 8 s of compute in two operations each; the first step took longer.
    noted = [[step, 10.0 * step + (5.0 if step else 0.0) + 4 * half, 4.0, 3.9] for step in range(5) for half in (0, 1)]
    down, up = 60_000_000, 80_000_000
    lanes = [{"lanes": {"worker 1: nic-down": {"bytes": down}, "worker 1: nic-up": {"bytes": up}}}] * 5
    link = Link.duplex(25e6)
    network = Network(workers=2, worker_link=link, node_link=link, widening=2.0)
    found = slow_link.figures(noted, lanes, network, 8.0)
    # Into a worker come all weights, and half of the other's gradient, which is float32: as many bytes as one copy.
    crossed = (down + up / 2) / 25e6
    assert (found["step"], found["compute"], found["steps"]) == (10.0, 8.0, 2)
    assert found["network"] == pytest.approx(crossed)
    assert found["over_forecast"] == 1.25
    assert found["late"] == pytest.approx(4 / 3.9 - 1)
    assert found["hidden"] == pytest.approx((8.0 + crossed - 10.0) / crossed)


def test_without_namespaces_it_says_so_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(slow_link, "why_not", lambda: "network namespaces need root")
    monkeypatch.setattr(sys, "argv", ["slow_link.py", "--scratch", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        slow_link.main()
    assert stopped.value.code == 2
    assert "need root" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
