"""What all contestants share: shapes, tokens, the cutting of a step, and what is counted."""

import argparse
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import SHAPES, TokenStream
from worker import Counters, Record, Task, measure, parser, write


@pytest.mark.parametrize(("size", "millions"), [("S", 134.1), ("M", 373.9), ("L", 1345.4)])
def test_shapes_have_the_sizes_they_are_named_for(size, millions):
    assert SHAPES[size].parameters / 1e6 == pytest.approx(millions, abs=0.05)


def test_a_step_has_the_same_tokens_whoever_asks_and_whenever():
    first, second = TokenStream(32000), TokenStream(32000)
    second.batch(0, sequences=1, length=16)  # asking for other steps changes nothing
    assert np.array_equal(first.batch(3, sequences=2, length=64), second.batch(3, sequences=2, length=64))
    assert not np.array_equal(first.batch(3, sequences=2, length=64), first.batch(4, sequences=2, length=64))


def test_the_next_token_is_one_of_four_and_the_tokens_are_valid():
    tokens = TokenStream(32000).batch(0, sequences=8, length=4096)
    assert tokens.dtype == np.int64
    assert tokens.min() >= 3
    assert tokens.max() < 32000
    followers = {}
    for row in tokens:
        for here, there in pairwise(row):
            followers.setdefault(here, set()).add(there)
    assert max(map(len, followers.values())) == 4


@given(length=st.sampled_from([128, 256, 512, 1024, 4096]), sequences=st.integers(1, 24))
@settings(deadline=None)
def test_micro_batches_divide_the_step_and_stay_below_2048_tokens(length, sequences):
    options = options_of("--tokens-per-step", str(length * sequences), "--sequence-length", str(length))
    task = Task.of(options)
    assert task.sequences == sequences
    assert sequences % task.micro_batch == 0
    assert task.micro_batch == 1 or task.micro_batch * length <= 2048


@pytest.mark.parametrize(
    "words",
    [
        ["--tokens-per-step", "1000", "--sequence-length", "512"],
        ["--tokens-per-step", "256", "--sequence-length", "512"],
        ["--tokens-per-step", "2048", "--sequence-length", "512", "--micro-batch", "3"],
        ["--steps", "2", "--warmup", "2"],
    ],
)
def test_a_task_that_cannot_be_cut_is_refused(words, capsys):
    with pytest.raises(SystemExit) as ending:
        Task.of(options_of(*words))
    assert ending.value.code == 2
    assert "error: --" in capsys.readouterr().err


def test_counters_see_what_this_process_writes(tmp_path):
    before = Counters.now()
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * (8 << 20))
    used = before.until(Counters.now())
    assert used["seconds"] > 0
    assert used["cpu_seconds"] > 0
    # 0 on file systems in memory; a page of a directory may come on top.
    assert used["written_bytes"] == 0 or 0 <= used["written_bytes"] - (8 << 20) < 1 << 20


def test_measure_leaves_the_warm_up_out_of_the_totals(tmp_path):
    task = Task(sequences=1, length=8, micro_batch=1, steps=4, warmup=2, vocabulary=600)
    ended = []
    losses = iter([4.0, 3.0, 2.0, 1.0])
    record = Record("someone", {}, {})
    measure(task, lambda batch: (next(losses), {"shape": batch.shape}), finish=lambda: ended.append(True), record=record)
    assert [row["loss"] for row in record.rows] == [4.0, 3.0, 2.0, 1.0]
    assert record.rows[0]["shape"] == (1, 8)
    assert ended == [True]
    counted = record.rows[-1]["stop_clock"] - record.rows[2]["start_clock"]
    assert counted <= record.totals["seconds"] < record.rows[-1]["stop_clock"] - record.rows[0]["start_clock"] + 0.05
    write(record, tmp_path / "result.json")
    assert (tmp_path / "result.json").read_text().startswith("{")


def options_of(*words: str) -> argparse.Namespace:
    return parser("test").parse_args(["--model", "m", "--scratch", "s", "--result", "r", *words])
