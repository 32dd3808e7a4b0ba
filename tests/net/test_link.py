"""A visitor measures the link to a node, and disturbs nobody."""

import numpy as np
import pytest
from net_peers import VERSION, at_once, joined, listening

from headrace.cli.machine_sheet import machine_sheet, sheet_text
from headrace.peers.meet import link
from headrace.peers.meet.member import Member
from headrace.terms.errors import ConfigError


def test_a_visitor_measures_both_ways_while_a_worker_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_MOST_BYTES", 1 << 20)
    with listening(secret=b"word") as listener:
        with pytest.raises(ConfigError, match="does not have the secret"):
            Member(listener.address, name="stranger", version=VERSION, visits=True)
        node, (member,), (worker,) = joined(listener, 1, secret=b"word")
        visitor = Member(listener.address, name="doctor", version=VERSION, secret=b"word", visits=True)
        found = visitor.measure()
        visitor.close()
        assert 0 < found.round_trip_seconds < 20
        assert min(found.up_bytes_per_second, found.down_bytes_per_second) > 1e4
        sent, taken = np.arange(100, dtype=np.uint8), np.empty(100, np.uint8)
        at_once(lambda: node.down.send(sent, 1), lambda: worker.down.receive(taken, 0))
        assert np.array_equal(sent, taken)
        member.close()


def test_the_sheet_has_a_line_for_it() -> None:
    values = {"address": "node:1", "up_bytes_per_second": 1.25e9, "down_bytes_per_second": 5e8, "round_trip_seconds": 0.0012}
    text = sheet_text(machine_sheet((), measure=False, link=values))
    assert "link      node:1: to the node 1250 MB/s (10 Gbit/s), from it 500 MB/s (4 Gbit/s), round trip 1.20 ms" in text
