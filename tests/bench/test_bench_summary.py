"""Summaries: medians over rounds, ratios within rounds, losses against the reference; and the words of the command line."""

import argparse
from pathlib import Path

import pytest
from compare import check_deepspeed, chosen, command_of, options_of
from hypothesis import given
from hypothesis import strategies as st
from limits import requests
from memory import budget_bytes, judge
from shapes import SHAPES
from summary import progress_line, summaries_of, table_of

OPTIONS = argparse.Namespace(size="T", tokens_per_step=512, sequence_length=128, steps=3, warmup=1, rounds=2)
PARAMETERS = SHAPES["T"].parameters


def run(name, number, seconds, losses=(3.0, 2.0, 1.0)):
    rows = [
        {"seconds": s, "cpu_seconds": s, "others_cpu_seconds": 0.0, "loss": x} for s, x in zip(seconds, losses, strict=True)
    ]
    used = {"seconds": sum(seconds[1:]), "cpu_seconds": sum(seconds[1:]), "others_cpu_seconds": 0.0}
    return {
        "name": name,
        "round": number,
        "status": "ok",
        "rows": rows,
        "totals": used | {"read_bytes": 28 * PARAMETERS, "written_bytes": 24 * PARAMETERS},
        "peak_anonymous_bytes": 2**30,
        "peak_anonymous_bytes_loading": 2**29,
        "peak_anonymous_bytes_stepping": 2**30,
        "disk_peak_bytes": 0,
        "start_up_seconds": 1.0,
        "finish_seconds": 0.5,
    }


def test_ratios_are_formed_within_rounds():
    # The machine is ten times slower in the second round; the ratio is 2 in both.
    runs = [run("a", 0, [9, 1, 1]), run("b", 0, [9, 2, 2]), run("a", 1, [9, 10, 10]), run("b", 1, [9, 20, 20])]
    reference, other = summaries_of(["a", "b"], runs, OPTIONS)
    assert reference["step_ratio"] == 1.0
    assert other["step_ratio"] == 2.0
    assert other["step_ratio_range"] == [2.0, 2.0]
    assert other["step_seconds"] == 11.0
    assert other["step_seconds_fastest"] == 2
    assert other["read_bytes_per_parameter"] == 14.0
    assert other["written_bytes_per_parameter"] == 12.0


def test_losses_are_held_against_plain_where_it_ran():
    runs = [run("a", 0, [1, 1, 1], losses=(3.0, 2.25, 1.0)), run("plain", 0, [1, 1, 1])]
    a, plain = summaries_of(["a", "plain"], runs, OPTIONS)
    assert (a["loss_compared_with"], a["largest_loss_difference"]) == ("plain", 0.25)
    assert plain["largest_loss_difference"] == 0.0


def test_a_contestant_that_failed_keeps_its_row():
    failed = {"name": "b", "round": 0, "status": "failed with exit code 1", "log": "why"}
    summaries = summaries_of(["a", "b"], [run("a", 0, [1, 1, 1]), failed], OPTIONS)
    table = table_of(summaries, OPTIONS, {"cores": 2, "processor": "p", "memory_bytes": 2**34, "file_system": "ext4"})
    assert "| b | failed with exit code 1 |" in table
    assert "why" in progress_line(failed, 1)
    assert "1.00 s a step" in progress_line(run("a", 0, [1, 1, 1]), 1)


def test_a_failed_reference_leaves_the_others_without_ratio():
    failed = {"name": "a", "round": 0, "status": "failed with exit code 1", "log": ""}
    _, b = summaries_of(["a", "b"], [failed, run("b", 0, [1, 1, 1])], OPTIONS)
    assert b["status"] == "ok"
    assert "step_ratio" not in b


def words(*more):
    return options_of(["--scratch", "s", "--output", "o", *more])


def test_a_variant_is_its_contestant_with_more_options():
    options = words("--contestants", "plain", "--variant", "h8=headrace --host-memory 8GiB", "--host-memory", "2GiB")
    plain, variant = chosen(options)
    assert (plain.name, variant.name, variant.script) == ("plain", "h8", "run_headrace.py")
    command = command_of(variant, options, Path("model"))
    assert command[-2:] == ["--host-memory", "8GiB"]  # after the common one, so it wins


@pytest.mark.parametrize("more", [["--contestants", "plain,nobody"], ["--variant", "x=nobody --fast"], ["--variant", "x"]])
def test_unknown_contestants_are_refused(more, capsys):
    with pytest.raises(SystemExit) as ending:
        chosen(words(*more))
    assert ending.value.code == 2
    assert "is none of headrace, plain" in capsys.readouterr().err


@pytest.mark.parametrize("python", [None, Path("/nonexistent/python"), Path("/bin/false")])
def test_a_missing_deepspeed_is_said_clearly(python, capsys):
    with pytest.raises(SystemExit) as ending:
        check_deepspeed(python)
    assert ending.value.code == 2
    assert "--deepspeed-python" in capsys.readouterr().err


@given(share=st.floats(0, 1), count=st.integers(1, 300))
def test_the_mix_of_requests_is_kept_at_every_moment(share, count):
    stream = requests(4096, 10 * 4096, share)
    taken = [next(stream) for _ in range(count)]
    for end in range(1, count + 1):
        assert abs(sum(is_read for is_read, _ in taken[:end]) - share * end) <= 1
    assert all(offset < 5 * 4096 if is_read else 5 * 4096 <= offset < 10 * 4096 for is_read, offset in taken)


def memory_record(peak, counted):
    record = run("headrace", 0, [1, 1, 1]) | {"peak_anonymous_bytes": peak}
    for row in record["rows"]:
        row["engine_read_bytes"], row["engine_written_bytes"] = {"ssd": counted * PARAMETERS}, {"ssd": 12 * PARAMETERS}
    return record


def test_memory_judges_peak_traffic_and_counters():
    options = argparse.Namespace(size="T", host_memory="1GiB", optimizer="adamw")
    assert judge(memory_record(2**30, 14), options) == []
    assert judge(memory_record(2**30 + 2**20, 14), options) == ["the peak is 1 MiB above the budget"]
    (counters,) = judge(memory_record(2**30, 10), options)
    assert "the engine counts 10.00 bytes read" in counters


def test_memory_budget_units(capsys):
    assert budget_bytes("2.5GiB") == 2.5 * 2**30
    with pytest.raises(SystemExit):
        budget_bytes("lots")
    assert "'lots'" in capsys.readouterr().err
