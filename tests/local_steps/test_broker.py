"""The broker alone: learners here are the test. They come late, leave, push what is stale or no numbers; the node dies between
any two writes. Every lot of rows is merged once, or named as lost once.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiers import sampled

from headrace.data.batches.open_data import open_stream
from headrace.peers.local_steps.broker import Broker, LearnerWork
from headrace.peers.local_steps.ledger import Journal, read_journal
from headrace.peers.local_steps.number_file import NumberFile
from headrace.peers.local_steps.outer import OuterState
from headrace.peers.local_steps.rounds import ByQuorum, Replayed, Rounds
from headrace.runs.engines import state_of
from headrace.runs.protocols import StateKind
from headrace.terms.options.run_options import NodeOptions
from headrace.update.sites.travel import TRAVELS

STEPS, MERGES = 3, 3


@pytest.fixture
def opened(tmp_path: Path, options: Callable[..., NodeOptions], begun: Callable[..., OuterState]) -> Callable[..., Any]:
    """Return a function that opens the broker of a run, or begins it."""

    def open_broker(
        name: str = "run", quorum: int = 2, merges: int = MERGES, travel: str = "bfloat16", rounds: Rounds | None = None
    ) -> tuple[Broker, OuterState]:
        output = tmp_path / name
        config = options(output)
        there = state_of(output) is StateKind.COMMITTED
        state = OuterState.resume(output, lambda event: None) if there else begun(output)
        how: dict[str, Any] = {"steps": STEPS, "total_steps": STEPS * merges, "travel": TRAVELS[travel]}
        broker = Broker(state, open_stream(config), rounds or ByQuorum(quorum, 0.0), folder=output / "exchange", **how)
        return broker, state

    return open_broker


def never() -> bool:
    return False


def units(broker: Broker, seed: int, scale: float = 1e-3) -> Iterator[NDArray[Any]]:
    dice = torch.Generator().manual_seed(seed)
    counts = broker._state.masters.counts
    return (broker._travel.encode(torch.randn(count, generator=dice) * scale) for count in counts)


def given(broker: Broker, peer: str, held: int | None, lot: int | None = None) -> LearnerWork | None:
    """Return what a learner is given now; None if it has to wait."""
    asked = iter([False, True])
    with broker.learner(peer) as number, broker.work(number, held, lot, lambda: next(asked, True)) as work:
        return work


def push(broker: Broker, work: LearnerWork | None, seed: int = 0, scale: float = 1e-3) -> str | None:
    assert work is not None, "it was given rows"
    lot = work.lot
    return broker.why_not(lot.learner, lot.number) or broker.take(lot.number, units(broker, seed, scale), {"loss": 1.0})


def test_learners_come_late_and_leave_and_each_lot_is_merged_or_named(opened: Callable[..., Any]) -> None:
    broker, state = opened(merges=5)
    with state:
        first, second = given(broker, "a", 0), given(broker, "b", 0)
        assert (first.lot.first, first.lot.stop, second.lot.first) == (0, 6, 6), "rows of one order"
        assert broker.merge_if_due() is None
        assert push(broker, first) is None
        assert given(broker, "a", 0) is None, "who has pushed waits for another version"
        assert push(broker, second) is None
        assert push(broker, second) == "it is there, or was named as lost"
        assert broker.merge_if_due()["version"] == 1
        late = given(broker, "c", None)
        assert late.whole, "who joins is sent all numbers"
        assert late.lot.base == 1
        onward = given(broker, "a", 0)
        assert not onward.whole
        assert len(onward.files) == 1, "one change"
        for version in (1, 2, 3):  # b has left; c is slow
            assert push(broker, onward, version) is None
            assert push(broker, given(broker, f"d{version}", None), version) is None
            assert broker.merge_if_due()["version"] == version + 1
            onward = given(broker, "a", version)
            assert onward is not None
        assert broker.why_not(late.lot.learner, late.lot.number) == "stale: it began with version 1, the newest is 4"
        behind = given(broker, "c", 1)
        assert behind.whole, "only two changes are kept"
        nearer = given(broker, "b", 2)
        assert not nearer.whole
        assert len(nearer.files) == 2
        assert push(broker, onward, 9, scale=float("inf")) == "its numbers are not finite"
        assert push(broker, behind) is None
        assert push(broker, nearer) is None
        third = given(broker, "e", None)
        assert push(broker, third, scale=1.0) is None
        line = broker.merge_if_due()
        assert {each["lot"] for each in line["lots"]} == {behind.lot.number, nearer.lot.number}
        reasons = {each["lot"]: each["reason"] for each in line["lost"]}
        assert "stale" in reasons[late.lot.number]
        assert "finite" in reasons[onward.lot.number]
        assert "median" in reasons[third.lot.number]
        assert broker.is_done
        broker.finish()
        assert_each_lot_once(broker)


def assert_each_lot_once(broker: Broker) -> None:
    lines = read_journal(broker._folder.parent / "merges.jsonl")
    told = [each["lot"] for line in lines for each in (*line["lots"], *line["lost"])]
    assert sorted(told) == list(range(broker.ledger.next_lot))
    rows = sorted(tuple(each["rows"]) for line in lines for each in (*line["lots"], *line["lost"]))
    assert all(before[1] == after[0] for before, after in pairwise(rows)), "no row is trained twice"


def test_what_is_not_finite_is_never_merged_even_if_the_node_dies_before_it_says_so(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    broker, state = opened(quorum=1)
    with state:
        work = given(broker, "a", 0)
        monkeypatch.setattr(broker, "_lose", killed)
        with pytest.raises(KeyboardInterrupt):
            push(broker, work, scale=float("inf"))
    broker, state = opened(quorum=1)
    with state:
        assert broker.merge_if_due() is None
        work = given(broker, "a", 0)
        lot = work.lot
        assert broker.take(lot.number, units(broker, 1), {"loss": float("nan")}) == "its numbers are not finite"
        assert push(broker, given(broker, "a", 0)) is None
        assert [each["reason"] for each in broker.merge_if_due()["lost"]] == ["its numbers are not finite"] * 2


def test_a_learner_that_was_killed_gets_its_rows_again(opened: Callable[..., Any]) -> None:
    broker, state = opened(quorum=1)
    with state:
        work = given(broker, "a", 0)
        again = given(broker, "a", 0, work.lot.number)
        assert again.lot == work.lot
        assert all(np.array_equal(one.input_ids, two.input_ids) for one, two in zip(work.batches, again.batches, strict=True))
        assert push(broker, given(broker, "b", 0)) is None
        assert broker.merge_if_due() is not None
        begins = given(broker, "a", 0)  # it was killed before it knew of the lot
        assert begins.lot.number == work.lot.number
        assert begins.lot.base == 1


def test_pushes_are_judged_by_those_that_were_accepted_and_a_replay_throws_out_the_same(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    """Also if there is one learner alone, whose push is the median of its own merge; also after a restart."""
    broker, state = opened("run", quorum=1, merges=40)
    with state:
        for number in range(8):
            work = given(broker, "a", number)
            assert push(broker, work, number, scale=9e-3 if number == 1 else 1e-3) is None
            assert broker.merge_if_due() is not None
        thrown = given(broker, "a", 8)
        push(broker, thrown, 8, scale=2e-2)
        assert broker.merge_if_due() is None
    broker, state = opened("run", quorum=1, merges=40)
    with state:
        work = given(broker, "a", 8)
        push(broker, work, 9, scale=5e-3)
        line = broker.merge_if_due()
        assert [each["reason"] for each in line["lost"]] == [
            "a norm is above 10 times the median of the last 8 that were accepted"
        ]
        assert [each["lot"] for each in line["lots"]] == [work.lot.number]
        assert len(line["lots"][0]["norms"]) == len(state.masters.counts)
        broker.finish()
    lines = read_journal(tmp_path / "run" / "merges.jsonl")
    broker, state = opened("again", merges=40, rounds=Replayed(lines))
    with state:
        while broker.ledger.version < 9:
            version = broker.ledger.version
            push(broker, given(broker, "a", version), 0, scale=1e3 if version == 3 else 1e-3)
            broker.merge_if_due()
        again = read_journal(tmp_path / "again" / "merges.jsonl")
    for one, other in zip(lines[:9], again, strict=True):
        for key in ("lots", "lost"):
            assert [each["lot"] for each in one[key]] == [each["lot"] for each in other[key]]


def test_a_learner_whose_pushes_are_thrown_out_three_times_gets_no_more_rows(opened: Callable[..., Any]) -> None:
    broker, state = opened("run", quorum=1)
    with state:
        for number in range(3):
            work = given(broker, "a", 0)
            if number == 2:
                broker.throw_out(work.lot.number, "it sends half")
            else:
                assert push(broker, work, scale=float("nan")) == "its numbers are not finite"
        assert given(broker, "a", 0) is None
    broker, state = opened("run", quorum=1)
    with state:
        assert given(broker, "a", 0) is None, "also after the node was started again"
        assert "3 pushes of learner 1 were thrown out" in (broker.why_no_more(1) or "")
        assert push(broker, given(broker, "b", 0)) is None, "others go on"
        assert broker.merge_if_due() is not None


class Killed(BaseException):
    """The node dies here."""


@pytest.mark.parametrize("travel", sampled(TRAVELS, ["int8"]))
@pytest.mark.parametrize("first", sampled(range(1, 18), [9]))
def test_a_node_that_dies_between_any_two_writes_goes_on(
    first: int, travel: str, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    countdown = [1 << 30]

    def dying(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def write(*arguments: Any, **more: Any) -> Any:
            for after in (False, True):
                countdown[0] -= 1
                if countdown[0] == 0:
                    raise Killed
                if not after:
                    found = real(*arguments, **more)
            return found

        monkeypatch.setattr(kind, name, write)

    for kind, name in ((OuterState, "commit"), (NumberFile, "write"), (Journal, "append"), (Path, "unlink")):
        dying(kind, name)

    def walk(broker: Broker) -> None:
        """Two learners take turns; each knows what it pushed, and pushes the same numbers for the same lot."""
        while not broker.is_done:
            works = [given(broker, peer, None) for peer in ("a", "b")]
            for work in works:
                if work is not None:
                    push(broker, work, work.lot.number)
            broker.merge_if_due()
        broker.finish()

    def final(broker: Broker) -> list[torch.Tensor]:
        return [broker._state.masters.read(unit) for unit in range(len(broker._state.masters.counts))]

    broker, state = opened("whole", travel=travel)
    with state:
        countdown[0] = 1 << 30
        walk(broker)
        expected, writes = final(broker), (1 << 30) - countdown[0]
    assert writes > 40
    for cut_at in range(first, writes, 17):
        countdown[0] = 1 << 30
        broker, state = opened(f"cut-{cut_at}", travel=travel)
        countdown[0] = cut_at
        with suppress(Killed):
            walk(broker)
        countdown[0] = 1 << 30
        state.close()
        broker, state = opened(f"cut-{cut_at}", travel=travel)
        with state:
            walk(broker)
            assert_each_lot_once(broker)
            assert all(map(torch.equal, final(broker), expected)), f"killed at write {cut_at}"
