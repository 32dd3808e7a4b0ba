"""The page of a run on several processes: each has rows of its own, and who waits for whom stays right.

Run: pytest tests/apps/pages/test_pages_of_peers.py
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import made_ops, write_run

from headrace.apps import read_run, write_picture, write_report
from headrace.apps.pages.findings import find
from headrace.apps.pages.sentences import lane_words
from headrace.apps.pages.views import lane_heading, lane_place
from headrace.report.lanes import LanesFile
from headrace.terms.events import OpDone
from headrace.terms.lanes import Lane, Peer, lane_of_peer, split_lane

OWN_LANES = ("Compute", "SSD reads", "SSD writes", "Update")


def made_run(directory: Path, peer: Peer, size: int) -> Path:
    """Write a run of `size` processes, which all do the same at once."""
    write_run(directory)
    recorder = LanesFile(directory)
    for step in range(1, 4):
        for number in range(size):
            for op in made_ops(step):
                recorder(op if number == 0 else _of(op, peer, number))
    recorder.close()
    return directory


def _of(op: OpDone, peer: Peer, number: int) -> OpDone:
    return replace(op, lane=lane_of_peer(peer, number, op.lane))


@pytest.mark.parametrize("peer", [Peer.RANK, Peer.STAGE])
def test_each_process_has_rows_of_its_own_in_the_order_of_ranks(peer: Peer, tmp_path: Path) -> None:
    text = write_report(made_run(tmp_path / "run", peer, 3)).read_text(encoding="utf-8")
    rows = re.findall(r'<div class="lane-name">([^<]*: [^<]*)</div>', text)
    wanted = [f"{peer.capitalize()} {number}: {lane}" for number in range(3) for lane in OWN_LANES]
    assert [row for row in rows if row in wanted] == wanted
    # The plan is that of one process, and is drawn for the first.
    planned, measured = (text.count(f'class="track {name}"') for name in ("planned", "measured"))
    assert measured - planned == 2 * len(OWN_LANES)
    picture = write_picture(tmp_path / "run", tmp_path / "lanes.svg").read_text(encoding="utf-8")
    assert [name for name in re.findall(r">([^<]*: [^<]*)</text>", picture) if name in wanted] == wanted


def test_a_rank_waits_by_its_own_lanes_and_a_node_and_stages_for_others(tmp_path: Path) -> None:
    for peer in Peer:
        waited = find(read_run(made_run(tmp_path / peer, peer, 2))).waits[Lane.COMPUTE]
        charged = {split_lane(each.lane)[0] for each in waited}
        assert charged == {None if peer is Peer.RANK else peer}, "of those that end at once, the last one counts"
        # Compute waits 0.1 s for a fetch and 0.4 s for the update.
        assert sum(each.seconds for each in waited) == pytest.approx(0.5, abs=1e-3)


def test_lanes_of_peers_have_words_and_places() -> None:
    reads = lane_of_peer(Peer.RANK, 11, Lane.SSD_READ)
    lanes = [reads, lane_of_peer(Peer.RANK, 2, Lane.SSD_WRITE), Lane.UPDATE, lane_of_peer(Peer.RANK, 2, Lane.COMPUTE)]
    assert sorted(lanes, key=lane_place) == [lanes[2], lanes[3], lanes[1], lanes[0]]
    assert lane_words(reads) == "SSD reads of rank 11"
    assert [lane_heading(lane, lanes) for lane in lanes[1:3]] == ["Rank 2: SSD writes", "Rank 0: Update"]
    assert lane_heading(Lane.UPDATE) == "Update"
    assert split_lane("rank : compute") == (None, 0, "rank : compute")


def test_the_page_says_how_busy_the_slowest_stage_was(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", Peer.STAGE, 2)
    assert "slowest stage" not in write_report(run).read_text(encoding="utf-8")
    figures = {"groups": 8, "utilisation": 0.71, "bound": 0.8, "group_seconds": 1.5, "transfer_seconds": 0.25}
    (run / "summary.json").write_text(json.dumps({"stages": figures}))
    page = write_report(run).read_text(encoding="utf-8")
    assert "The slowest stage computed 71% of the steps&#x27; time, where 80% is the most" in page
    assert "G = 8 groups, t = 1.5 s of one, c = 250 ms on a link" in page
    for damaged in ({"stages": 3}, {"stages": {"groups": "x"}}, {"stages": None}):
        (run / "summary.json").write_text(json.dumps(damaged))
        assert "slowest stage" not in write_report(run).read_text(encoding="utf-8")
