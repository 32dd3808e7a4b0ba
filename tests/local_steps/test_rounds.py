"""When merges are due, and what a journal repeats: by values alone, with a simulated clock."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.peers.local_steps.ledger import Journal, Lot, LotLedger, read_journal
from headrace.peers.local_steps.node import Waiting
from headrace.peers.local_steps.rounds import ByQuorum, Replayed
from headrace.terms.errors import ConfigError
from headrace.terms.options.run_options import NodeOptions


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lot(number: int, learner: int, base: int = 0) -> Lot:
    return Lot(number=number, learner=learner, base=base, first=8 * number, stop=8 * number + 8, tokens=100, data={})


def test_a_merge_waits_for_the_quorum_and_then_for_the_grace() -> None:
    clock = Clock()
    rounds, ledger = ByQuorum(2, 30.0, clock), LotLedger()
    assert rounds.due(ledger, [lot(1, 1)], others=True) == ()
    clock.now = 100.0
    two = [lot(1, 1), lot(0, 2)]
    assert rounds.due(ledger, two, others=True) == ()
    clock.now = 129.0
    assert rounds.due(ledger, two, others=True) == ()
    assert [each.number for each in rounds.due(ledger, two, others=False)] == [0, 1], "nobody else is waited for"
    clock.now = 140.0
    assert rounds.due(ledger, two, others=True) == (), "the grace begins anew"
    clock.now = 170.0
    assert [each.number for each in rounds.due(ledger, two, others=True)] == [0, 1]


def test_older_pushes_weigh_less() -> None:
    assert [lot(0, 1, base).weight(3) for base in (3, 2, 1)] == [100, 80, 100 / 1.5]


def test_a_ledger_survives_json_and_names_what_is_lost() -> None:
    ledger = LotLedger(data={"epoch": 0}).with_learner("a").with_learner("b").with_learner("a")
    assert ledger.learners == {"a": 1, "b": 2}
    ledger = ledger.with_lot(lot(0, 1)).with_lot(lot(1, 2)).with_lot(lot(2, 1))
    ledger = ledger.losing([lot(2, 1)], "stale")
    plain = json.dumps(ledger.to_json())
    assert json.dumps(LotLedger.from_json(json.loads(plain)).to_json()) == plain
    merged = ledger.merged([lot(0, 1).named()], norm=1.0)
    assert merged.version == 1
    assert set(merged.lots) == {1}
    assert merged.line is not None
    assert [each["lot"] for each in merged.line["lost"]] == [2]
    assert merged.line["lost"][0]["rows"] == [16, 24]


def test_the_journal_follows_from_the_ledger_after_any_kill(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"version": number, "lots": [], "lost": []} for number in (1, 2, 3)]
    journal = Journal(tmp_path / "merges.jsonl", None)
    journal.append(lines[0])
    (tmp_path / "merges.jsonl").open("a").write('{"version": 2, "lo')  # killed in a line
    assert Journal(tmp_path / "merges.jsonl", lines[1]).lines == lines[:2]
    assert read_journal(tmp_path / "merges.jsonl") == lines[:2]
    assert Journal(tmp_path / "merges.jsonl", lines[1]).lines == lines[:2], "each merge has one line"
    (tmp_path / "merges.jsonl").write_text('{"version": 1}\n')
    with pytest.raises(ConfigError, match="no journal"):
        read_journal(tmp_path / "merges.jsonl")


def test_a_replay_deals_and_merges_as_the_journal_says() -> None:
    first = LotLedger().with_lot(lot(0, 1)).with_lot(lot(1, 2)).with_lot(lot(2, 3))
    second = first.merged([lot(0, 1).named(), lot(1, 2).named()])
    third = second.with_lot(lot(3, 1, 1)).losing([lot(2, 3)], "stale").merged([lot(3, 1, 1).named()])
    rounds = Replayed([dict(each.line or {}) for each in (second, third)])
    begun = LotLedger()
    assert [rounds.next_rows(learner, begun) for learner in (1, 2, 3, 4)] == [(0, 0), (1, 8), (2, 16), None]
    begun = begun.with_lot(lot(0, 1)).with_lot(lot(1, 2))
    assert rounds.due(begun, [lot(0, 1), lot(1, 2)], others=False) == (), "the third lot begins with this version, too"
    begun = begun.with_lot(lot(2, 3))
    assert rounds.due(begun, [lot(1, 2)], others=False) == ()
    assert [each.number for each in rounds.due(begun, [lot(1, 2), lot(0, 1), lot(2, 3)], others=True)] == [0, 1]
    assert rounds.lost(begun) == {}
    again = begun.merged([lot(0, 1).named(), lot(1, 2).named()])
    assert rounds.next_rows(1, again) == (3, 24)
    assert rounds.next_rows(2, again) is None
    assert rounds.lost(again) == {2: "stale"}
    assert rounds.next_rows(3, replace(again, lots={})) is None, "no lot is dealt twice"


def test_a_quorum_says_how_many_learners_it_waits_for() -> None:
    rounds, ledger = ByQuorum(2, 0.0), LotLedger()
    assert (
        rounds.waits_for(ledger, [], ()) == "merge 1 waits for 2 more learners: 0 of the quorum's 2 have sent what they learned"
    )
    assert rounds.waits_for(ledger, [lot(0, 1)], (1,)).startswith("merge 1 waits for one more learner: 1 of the quorum's 2")
    assert rounds.waits_for(ledger, [lot(0, 1), lot(1, 2)], (1, 2)) == ""


def test_a_replay_says_for_which_learner_of_the_journal_it_waits() -> None:
    line = LotLedger().with_lot(lot(0, 1)).with_lot(lot(1, 2)).merged([lot(0, 1).named(), lot(1, 2).named()]).line
    rounds = Replayed([dict(line or {})])
    begun = LotLedger().with_lot(lot(0, 1))
    words = "replay: merge 1 waits for learner 2, who took lot 1; learners that are here: 1"
    assert rounds.waits_for(begun, [lot(0, 1)], (1,)) == words
    begun = begun.with_lot(lot(1, 2))
    assert rounds.waits_for(begun, [lot(0, 1), lot(1, 2)], (1, 2)) == ""
    assert rounds.waits_for(LotLedger(), [], ()).endswith(
        "learner 1, who took lot 0, learner 2, who took lot 1; learners that are here: none"
    )


def test_who_is_waited_for_is_said_once_and_only_where_it_lasts() -> None:
    said, clock = list[str](), Clock()
    waiting = Waiting(said.append, clock)
    for seconds, words in (
        (0, "a"),
        (5, "a"),
        (6, ""),
        (7, "a"),
        (16, "a"),
        (18, "a"),
        (40, "a"),
        (41, "b"),
        (60, "b"),
        (90, "b"),
    ):
        clock.now = seconds
        waiting(words)
    assert said == ["a", "b"]


def test_norms_of_accepted_pushes_and_what_was_thrown_out_are_kept() -> None:
    ledger = LotLedger()
    for number in range(40):
        ledger = ledger.with_lot(lot(number, 1)).merged([lot(number, 1).named(norms=[float(number)])])
    for number in (50, 51):
        ledger = ledger.with_lot(lot(number, 2)).losing([lot(number, 2)], "its numbers are not finite", thrown=True)
    ledger = ledger.with_lot(lot(52, 2)).losing([lot(52, 2)], "stale")
    ledger = LotLedger.from_json(json.loads(json.dumps(ledger.to_json())))
    assert [each[0] for each in ledger.accepted] == list(range(8, 40)), "the last 32"
    assert ledger.thrown == {"2": 2}
    old = {key: value for key, value in ledger.to_json().items() if key not in ("accepted", "thrown")}
    assert LotLedger.from_json(old).thrown == {}, "of a run that began before they were kept"


def test_options_of_local_steps_are_refused_where_they_mean_nothing() -> None:
    values = {"model": "m", "data": ["d"]}
    for more, words in (
        ({"quorum": 2}, "quorum: only a run with local_steps"),
        ({"local_steps": 5, "workers": 2}, "workers: .* give quorum"),
        ({"local_steps": 5, "eval_split": 0.1}, "eval_split: .* headrace eval"),
        ({"local_steps": 5, "loss": "dpo"}, "loss: .* one machine"),
        ({"local_steps": 5, "report_to": ["wandb"]}, "report_to: .* metrics.jsonl"),
        ({"local_steps": 5, "adapter": "lora:from=there"}, "adapter: from: .* merge the adapter"),
        ({"local_steps": 0}, "local_steps: expected a whole number"),
    ):
        with pytest.raises(ConfigError, match=words):
            NodeOptions.of(values | more)
