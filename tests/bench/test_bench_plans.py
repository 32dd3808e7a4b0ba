"""The page of plans: a cell is what the planner says, ranges are of the numbers, odd cells are found."""

from dataclasses import replace

import plans
import pytest
from transformers import LlamaConfig

TINY = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=512,
    max_position_embeddings=2048,
)


@pytest.mark.wide
def test_a_small_model_gets_a_table_with_its_times_and_its_wear(tmp_path):
    section = plans.Section("A small model", TINY, "For tests.", (plans.Cell(64, 1, 4096),))
    answers = plans.answers_of(section, tmp_path)
    found = answers[0][1]
    assert found["fits"]
    assert found["allowed_bytes"]["host"] == 56 << 30
    page = plans.page_of([(section, answers)])
    assert "0.0 billion parameters. For tests." in page
    assert f"| 64 GiB | {plans.format_seconds(found['step_seconds'])}, {found['tokens_per_second']:.0f}, " in page
    assert f"| 1 SSD | {found['peak_bytes']['device'] / 2**30:.1f} GiB | " in page


def made_up(seconds, *, cell, limit="compute", fits=True):
    return cell, {
        "fits": fits,
        "step_seconds": seconds,
        "lower_bound_seconds": 0.8 * seconds,
        "tokens_per_second": cell.tokens / seconds,
        "bottleneck": f"limited by {limit}: busy 90% of the step",
        "ssd_bytes_written_per_step": 2e12,
        "share_of_endurance": 0.5 / cell.ssds,
        "alternatives": [],
        "peak_bytes": {"device": 30 << 30, "ssd": 3e12} if fits else {"device": 30 << 30},
    }


def test_a_cell_that_does_not_fit_says_what_is_missing():
    _, found = made_up(1.0, cell=plans.Cell(64, 1, 4096), fits=False)
    assert plans.cell_words(found) == "does not fit: needs 30 GiB of device"


def a_grid(seconds_of, **changes):
    return [made_up(seconds_of(cell), cell=cell, **changes) for cell in plans.grid((16384, 65536))]


def test_tables_say_what_more_of_each_resource_buys():
    def seconds(cell):
        return 120.0 / cell.ssds * (cell.tokens / 16384)

    lines = list(plans.tables_of(a_grid(seconds)))
    assert lines.count("| main memory | 1 SSD | 4 SSDs | 12 SSDs |") == 2
    assert "| 64 GiB | 2 min 00 s, 137, compute | 30.0 s, 546, compute | 10.0 s, 1638, compute |" in lines
    assert "| 4 SSDs | 30.0 GiB | 3.0 TB | 2.00 TB | 12.5% | 1.25 |" in lines
    assert not plans.odd_cells(a_grid(seconds))
    lacking = list(plans.tables_of(a_grid(seconds, fits=False)))
    assert "| 1 SSD | does not fit |  |  |  |  |" in lacking


def test_cells_that_go_the_wrong_way_are_found():
    answers = a_grid(lambda cell: 100.0 if (cell.ram_gib, cell.ssds) == (128, 4) else 50.0)
    odd = plans.odd_cells(answers)
    assert any("64 GiB, 4 SSDs, 16384 tokens: 50.0 s a step; 128 GiB, 4 SSDs, 16384 tokens: 100.0 s" in line for line in odd)
    assert all("128 GiB, 4 SSDs" in line for line in odd)
    answers[0] = (answers[0][0], answers[0][1] | {"fits": True})
    missing = [(cell, found | {"fits": cell.ram_gib < 256}) for cell, found in a_grid(lambda cell: 50.0)]
    assert any("fits, 256 GiB" in line for line in plans.odd_cells(missing))
    assert replace(answers[0][0], tokens=1).words.endswith("1 tokens")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("limited by SSD reads and writes, which share the drives: busy 97% of the step", ("SSD reads and writes", 0.97)),
        ("no part is busy all the time: the most is compute with 73% of the step, and the rest is waiting", ("compute", 0.73)),
    ],
)
def test_the_limit_is_read_from_the_forecasts_words(text, expected):
    assert plans.limit_of({"bottleneck": text}) == expected
