"""The sweep: medians by amount, and how far the planner's choice is from the best point."""

from types import SimpleNamespace

import pytest
import replay_sweep


def row(amount, seconds, *, chosen=False):
    return {
        "chosen": chosen,
        "amount": amount,
        "total": 8,
        "seconds": seconds,
        "planned_seconds": 1.0,
        "peak_mib": 10.0 * amount,
        "planned_mib": 12.0 * amount,
        "kept_mib": 1.0,
    }


def test_rows_are_medians_by_amount_and_the_choice_comes_last():
    rows = [row(8, 3.0), row(4, 2.2, chosen=True), row(8, 5.0), row(8, 4.0), row(0, 2.0), {"chosen": False, "amount": 99}]
    found = replay_sweep.summarised(rows)
    assert [(each["amount"], each["seconds"], each["chosen"]) for each in found] == [
        (0, 2.0, False),
        (8, 4.0, False),
        (4, 2.2, True),
    ]
    assert found[1]["rounds"] == 3


@pytest.mark.parametrize(
    ("chosen", "words"), [(2.2, "within 10.0% of the best point (0 "), (1.5, "within 0.0% of the best point (4 ")]
)
def test_the_table_says_how_good_the_choice_is(chosen, words):
    options = replay_sweep.options_of(["--scratch", "s", "--output", "o", "--size", "T"])
    rows = replay_sweep.summarised([row(0, 2.0), row(8, 3.0), row(4, chosen, chosen=True)])
    table = replay_sweep.table_of(rows, options, SimpleNamespace(name="made up"))
    assert words in table
    assert "| 8 of 8 | 1 | 3.00 | 1.00 | 80 | 96 |" in table
    assert f"| 4 of 8 (the planner's choice) | 1 | {chosen:.2f} |" in table


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.svg"
    replay_sweep.draw(replay_sweep.summarised([row(0, 2.0), row(8, 3.0), row(4, 1.0, chosen=True)]), path)
    assert path.read_text().lstrip().startswith("<?xml")
