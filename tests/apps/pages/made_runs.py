"""Run directories made up for tests: round figures, so that every word on the page can be foretold."""

import json
from pathlib import Path
from typing import Any

from plan_changes import plan_of_fields

from headrace.plan.value.plan import Plan
from headrace.plan.value.results import Results
from headrace.report.lanes import LanesFile
from headrace.report.metrics import MetricsFile
from headrace.terms.events import OpDone, StepResult
from headrace.terms.forms import UnitFigures, home_of
from headrace.terms.machine.ceilings import Ceilings
from headrace.update import rule_of
from headrace.update.rules.adamw import AdamW

NUM_BLOCKS = 2


def made_plan(**changes: Any) -> Plan:
    """A plan for two blocks of a million parameters with a device of its own."""
    values: dict[str, Any] = {
        "compute_dtype": "bfloat16",
        "gradient_dtype": "bfloat16",
        "separate_device": True,
        "units": tuple(
            UnitFigures(name=name, num_elements=1 << 20, num_parameters=1_000_000, home=home_of(index, NUM_BLOCKS))
            for index, name in enumerate(("first", "1", "2", "last"))
        ),
        "num_blocks": NUM_BLOCKS,
        "tied": False,
        "sequence_length": 128,
        "tokens_per_step": 1024,
        "micro_batch_sequences": 4,
        "num_micro_batches": 2,
        "hidden_size_bytes": 512,
        "loss_chunk_tokens": 128,
        "update_policy": "immediate",
        "late_units": (),
        "held_gradients": "host",
        "checkpoint_every": 1,
        "host_slots": 2,
        "device_slots": 2,
        "prefetch": 1,
        "chunk_elements": 1 << 19,
        "state_slots": 3,
        "gradient_slots": 2,
        "resident_states": (),
        "accumulate": True,
        "stash_tiers": ("device",) * NUM_BLOCKS,
        "stash_slots": 0,
        "kept": ((),) * NUM_BLOCKS,
        "kept_bytes": (0,) * NUM_BLOCKS,
        "skipped": ((),) * NUM_BLOCKS,
        "operators": ((),) * NUM_BLOCKS,
        "compute_threads": 1,
        "update_threads": 1,
        "results": Results(
            forward_flops=(1e6, 1e9, 1e9, 1e6),
            epilogue_flops=1e8,
            spared_flops=(0.0,) * NUM_BLOCKS,
            peak_bytes={
                "device": {"weights": 4 << 20, "activations": 2 << 20},
                "host": {"runtime": 300 << 20, "states": 100 << 20},
                "ssd": {"states, two slots": 80 << 20},
            },
            allowed_bytes={"device": 8 << 20, "host": 512 << 20},
        ),
    }
    return plan_of_fields(rule=rule_of(AdamW(), "bfloat16").figures, **(values | changes))


def made_machine(**changes: Any) -> Ceilings:
    """A machine whose drives share 3 GB/s."""
    drive = {
        "read_bytes_per_second": 2e9,
        "write_bytes_per_second": 2e9,
        "mixed_bytes_per_second": 3e9,
        "capacity_bytes": 10**12,
        "rated_endurance_bytes": 1e12,
    }
    values: dict[str, Any] = {
        "name": "made-up machine",
        "has_device": True,
        "device_memory_bytes": 8 << 30,
        "host_memory_bytes": 64 << 30,
        "cores": 8,
        "flops_per_second": {"bfloat16": 1e11},
        "host_to_device_bytes_per_second": 10e9,
        "device_to_host_bytes_per_second": 10e9,
        "both_ways_bytes_per_second": 20e9,
        "host_memory_bytes_per_second": 100e9,
        "update_bytes_per_second": 40e9,
        "update_bytes_per_second_per_core": 20e9,
        "drives": [drive],
    }
    return Ceilings.from_json(values | changes)


def result(step: int, **changes: Any) -> StepResult:
    """A step that wrote a gigabyte."""
    values: dict[str, Any] = {
        "step": step,
        "loss": 4.0 / step,
        "grad_norm": 1.0,
        "learning_rate": 1e-5,
        "tokens": 1000,
        "trained_tokens": 900,
        "seconds": 1.0,
        "bytes_read": {"ssd": 2 * 10**9},
        "bytes_written": {"ssd": 10**9},
        "peak_bytes": {"host": 350 << 20},
    }
    return StepResult(**(values | changes))


def made_ops(step: int) -> list[OpDone]:
    """A second of which SSD reads take 0.9 (two at once for a while), compute 0.5: it waits 0.1 for fetch, 0.4 for update."""
    rows = [
        ("ssd-read", "fetch", 1, 0.0, 0.6, 2 * 10**8),
        ("ssd-read", "read-states", 1, 0.3, 0.9, 10**9),
        ("compute", "forward", 1, 0.0, 0.2, 0),
        ("ssd-read", "fetch", 2, 0.2, 0.3, 0),
        ("compute", "backward", 1, 0.3, 0.5, 0),
        ("update", "update", 1, 0.4, 0.9, 26 * 10**7),
        ("compute", "decide", -1, 0.9, 1.0, 0),
        ("ssd-write", "write-states", 1, 0.9, 1.0, 10**8),
    ]
    return [
        OpDone(
            step=step,
            label=f"{verb} unit {unit}",
            verb=verb,
            lane=lane,
            unit=unit,
            micro=-1,
            chunk=-1,
            start_seconds=100.0 + step + start,
            stop_seconds=100.0 + step + stop,
            bytes=size,
        )
        for lane, verb, unit, start, stop, size in rows
    ]


def write_run(directory: Path, *, steps: int = 6, without: tuple[str, ...] = (), **options: Any) -> Path:
    """Write all files of a run; step 3 was skipped, and the run was resumed before step 5."""
    directory.mkdir(parents=True, exist_ok=True)
    metrics = MetricsFile(directory / "metrics.jsonl")
    for step in range(1, steps + 1):
        metrics(result(step, skipped="gradient norm is inf", grad_norm=None) if step == 3 else result(step))
    metrics.close()
    for begin, end in ((1, min(5, steps + 1)), (5, steps + 1)):
        if begin < end:
            committed = begin - 1 if begin > 1 else None
            recorder = LanesFile(directory, committed_steps=committed, memory=lambda: {"host": 300 << 20})
            for step in range(begin, end):
                for event in made_ops(step):
                    recorder(event)
            recorder.close()
    (directory / "plan.json").write_text(json.dumps(made_plan().to_json()))
    (directory / "machine.json").write_text(json.dumps(made_machine().to_json()))
    values = {"model": "/somewhere/small-model", "max_steps": 100} | options
    (directory / "config.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items()))
    for name in without:
        (directory / name).unlink()
    return directory
