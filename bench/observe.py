"""What recording the lanes costs: a tiny model's steps with and without the recorder, interleaved, and seconds per event.

A tiny model is the hard case: its operations are short, so there are many events in a second. Prints JSON.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.report.lanes import LanesFile
from headrace.terms.events import Event, OpDone

ROWS, LENGTH = 8, 64


class Switch:
    """Counts and keeps the operations of a run; passes them on to `sink` while there is one."""

    def __init__(self) -> None:
        self.sink: LanesFile | None = None
        self.events: list[OpDone] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, OpDone):
            self.events.append(event)
        if self.sink is not None:
            self.sink(event)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--scratch", type=Path, default=None, help="directory for model and state")
    arguments.add_argument("--rounds", type=int, default=20, help="pairs of steps, one with and one without")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        print(json.dumps(measure(Path(name), options.rounds), indent=2))


def measure(scratch: Path, rounds: int) -> dict[str, float]:
    """Return medians of step seconds without and with the recorder, events per step, microseconds per event, and the share."""
    switch = Switch()
    without: list[float] = []
    with_recorder: list[float] = []
    with running(scratch, switch) as engine:
        recorder = LanesFile(scratch)
        for index in range(2 * rounds + 4):
            switch.sink = recorder if index % 2 else None
            started = time.perf_counter()
            engine.step(batch(index))
            if index >= 4:  # kernels compile and caches fill before
                (with_recorder if index % 2 else without).append(time.perf_counter() - started)
        engine.flush()
        recorder.close()
    steps = 2 * rounds + 4
    per_event = replay(scratch, switch.events)
    per_step = len(switch.events) / steps
    step_seconds = statistics.median(without)
    return {
        "step_seconds_without": step_seconds,
        "step_seconds_with": statistics.median(with_recorder),
        "events_per_step": per_step,
        "microseconds_per_event": per_event * 1e6,
        "share_of_step": per_event * per_step / step_seconds,
    }


@contextlib.contextmanager
def running(scratch: Path, sink: Switch) -> Iterator[Engine]:
    """Open an engine on a new tiny model."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(scratch / "model")
    with Engine.open(
        scratch / "model",
        headrace.Options(
            host_memory="1GiB",
            device_memory="64MiB",
            learning_rate=1e-3,
            output=scratch / "run",
            max_grad_norm=None,
            tokens_per_step=ROWS * LENGTH,
            sequence_length=LENGTH,
        ),
        sink=sink,
    ) as engine:
        yield engine


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 1000, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def replay(scratch: Path, events: list[OpDone]) -> float:
    """Return seconds per event of a fresh recorder that takes all events again, files and all: the best of five."""
    seconds = []
    for number in range(5):
        directory = scratch / f"replay-{number}"
        directory.mkdir()
        started = time.perf_counter()
        recorder = LanesFile(directory)
        for event in events:
            recorder(event)
        recorder.close()
        seconds.append(time.perf_counter() - started)
    return min(seconds) / len(events)


if __name__ == "__main__":
    main()
