"""A run whose data are read as they come, by the real engine: the bits of data tokenised beforehand, also through a kill.

Run: pytest tests/cli/test_streamed_run.py
"""

import json
import signal
from pathlib import Path

import pytest
from bad_worlds import World
from forked import PROCESSES, kill_at

from headrace.cli import main

ORDERED = ("shuffle=false", "--no-packing")
STREAMED = ("--streaming", "--buffer-size", "3")


def run(words: list[str], moment: str = "") -> None:
    if moment:
        kill_at(moment)
    main(words)


def ran(words: list[str], moment: str = "") -> int | None:
    process = PROCESSES.Process(target=run, args=(words, moment))
    process.start()
    process.join(250)
    return process.exitcode


def weights(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "final").glob("*.safetensors")}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.wide
def test_a_streamed_run_has_the_bits_of_one_whose_data_are_tokenised_beforehand(world: World) -> None:
    whole, streamed = world.folder / "whole", world.folder / "streamed"
    assert ran(world.train_words(*ORDERED, max_steps=4, output=whole)) == 0
    assert ran(world.train_words(*ORDERED, *STREAMED, max_steps=4, output=streamed)) == 0
    assert losses(streamed) == losses(whole)
    assert weights(streamed) == weights(whole)


@pytest.mark.process
@pytest.mark.timeout(280)
def test_a_streamed_run_that_is_killed_goes_on_at_the_very_row(world: World) -> None:
    undisturbed, killed = world.folder / "undisturbed", world.folder / "killed"
    assert ran(world.train_words(*STREAMED, max_steps=6, output=undisturbed)) == 0
    words = world.train_words(*STREAMED, max_steps=6, output=killed, plan=undisturbed)
    assert ran(words, "headrace.store:StateStore.commit:4:after") == -signal.SIGKILL, "the moment never came"
    assert ran(["resume", str(killed)]) == 0
    assert losses(killed) == losses(undisturbed)
    assert weights(killed) == weights(undisturbed)
