"""Headrace: full fine-tuning from SSD with exact AdamW, inside the host memory it is given."""

# ruff: noqa: E402  # settings come before torch, as on the command line
from headrace.plan.value.words import explain_plan
from headrace.process import set_process_defaults

set_process_defaults()

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bare import Recorder, bare_rates
from observed import Cores, interference, median_rate, ssd_rates
from shapes import TokenStream
from worker import Record, Task, measure, parser, refuse, write

import headrace
from headrace.flow.run.execute import PlainInterpreter
from headrace.plan.forecast.forecast import forecast
from headrace.plan.value.plan import Plan
from headrace.report.lanes import summarise
from headrace.terms.events import Event, OpDone
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Verb


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--optimizer", default="adamw:beta1=0.9,beta2=0.95,eps=1e-8", help="the rule and its settings")
    arguments.add_argument("--host-memory", default="4GiB", help="the host budget")
    arguments.add_argument("--device-memory", default=None, help="the device budget; none: the CPU computes in host memory")
    arguments.add_argument("--max-grad-norm", type=float, default=0.0, help="clip to this global norm; 0: not at all")
    arguments.add_argument(
        "--machine", type=Path, default=None, help="profile by which the plan is chosen; none: a nominal one"
    )
    arguments.add_argument(
        "--observe", type=int, default=0, metavar="REPEATS", help="record what lanes did, and repeat a step's requests alone"
    )
    options = arguments.parse_args()
    if options.observe and options.machine is None:
        refuse("--observe holds the run against the forecast on a measured machine: give --machine too")
    machine = Ceilings.from_json(json.loads(options.machine.read_text(encoding="utf-8"))) if options.machine else None
    task = Task.of(options)
    if not hasattr(headrace, "Engine"):
        refuse(f"this headrace ({headrace.__version__}, {headrace.__file__}) has no Engine")
    if options.threads:
        torch.set_num_threads(options.threads)
    ssd = options.scratch / "ssd"
    ssd.mkdir()
    operations: list[OpDone] = []

    def keep(event: Event) -> None:
        if isinstance(event, OpDone):
            operations.append(event)

    engine = headrace.Engine.open(
        options.model,
        headrace.Options(
            device_memory=options.device_memory,
            host_memory=options.host_memory,
            ssd=[ssd],
            learning_rate=options.learning_rate,
            optimizer=options.optimizer,
            weight_decay=0.0,
            output=options.scratch / "run",
            tokens_per_step=options.tokens_per_step,
            sequence_length=options.sequence_length,
            compute_dtype="bfloat16",
            max_grad_norm=options.max_grad_norm or None,
            machine=machine,
        ),
        sink=keep if options.observe else None,
    )
    recorder = Recorder(engine.store._parts.volume) if options.observe else None  # the store has no other door to its files

    def step(batch):
        tokens = torch.from_numpy(batch)
        result = engine.step({"input_ids": tokens, "labels": tokens})
        counted = {
            "engine_seconds": result.seconds,
            "engine_read_bytes": dict(result.bytes_read),
            "engine_written_bytes": dict(result.bytes_written),
            "engine_peak_bytes": dict(result.peak_bytes),
        }
        return float(result.loss), counted

    record = Record(
        contestant="headrace",
        versions={
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "headrace": headrace.__version__,
        },
        settings={
            "host_memory": options.host_memory,
            "device_memory": options.device_memory,
            "threads": torch.get_num_threads(),
            "max_grad_norm": options.max_grad_norm,
            "warmup": task.warmup,
        },
    )
    measure(task, step, finish=engine.flush if recorder else engine.close, record=record)
    if recorder:
        overlapped = operations[:]
        alone = run_alone(engine, operations, keep, lambda: step(batch_after(task)))
        seen = observations(engine.plan, machine, record, overlapped, alone)
        window = record.rows[-1]["start_clock"], record.rows[-1]["stop_clock"]
        requests = [(each.start_seconds, each.stop_seconds, each.buffer.size) for each in recorder.requests]
        counted = record.rows[task.warmup]["start_clock"], window[1]
        last = recorder.between(*window)
        seen["ssd"] = ssd_rates(overlapped, requests, *counted)
        load = nullcontext if machine.has_device else multiplying
        seen["bare"] = bare_rates(last, options.observe, machine.in_flight(1).threads, load=load) if last else None
        record.settings["observed"] = seen
        engine.close()
    write(record, options.result)


@contextmanager
def multiplying() -> Iterator[None]:
    """Keep the cores that compute has busy with matrix products, as compute does."""
    stop = threading.Event()

    def multiply() -> None:
        left, right = torch.ones(256, 768), torch.ones(768, 2048)
        while not stop.is_set():
            torch.mm(left, right)

    thread = threading.Thread(target=multiply)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def batch_after(task: Task) -> np.ndarray:
    """Return the batch that follows the measured ones."""
    return TokenStream(task.vocabulary).batch(task.steps, sequences=task.sequences, length=task.length)


def run_alone(
    engine: headrace.Engine, operations: list[OpDone], sink: Callable[[Event], None], step: Callable[[], object]
) -> list[OpDone]:
    """Take one more step whose operations run one after the other, and return them."""
    before = len(operations)
    steps = engine._steps  # there is no other door to the interpreter
    assert steps is not None
    steps.close()  # all it had is finished: the engine was flushed
    steps._interpreter = PlainInterpreter(engine.machine, sink)
    step()
    engine.flush()
    return operations[before:]


def observations(
    plan: Plan, machine: Ceilings, record: Record, overlapped: list[OpDone], alone: list[OpDone]
) -> dict[str, Any]:
    """Return what was planned, and what lanes and cores did in the steps after the warm-up."""
    counted = record.rows[record.settings["warmup"] :]
    begin, end = counted[0]["start_clock"], counted[-1]["stop_clock"]
    window = [op for op in overlapped if op.stop_seconds > begin and op.start_seconds < end]
    found = forecast(plan, machine)
    lanes = found.timeline.lanes
    return {
        "planned": {
            "step_seconds": found.step_seconds,
            "lower_bound_seconds": found.lower_bound_seconds,
            # What the cores have to do where there is no GPU: drains are converted by one thread.
            "core_seconds": lanes[Lane.COMPUTE].alone_seconds * plan.compute_threads
            + lanes[Lane.UPDATE].bytes / machine.update_bytes_per_second_per_core
            + lanes[Lane.DEVICE_TO_HOST].alone_seconds,
            "peak_bytes": {tier: plan.peak(tier) for tier in plan.results.peak_bytes},
            "ssd_read_bytes": found.ssd_bytes_read_per_step,
            "ssd_written_bytes": found.ssd_bytes_written_per_step,
            "lanes": {
                lane: {"busy_seconds": use.busy_seconds, "alone_seconds": use.alone_seconds} for lane, use in lanes.items()
            },
            "explanation": found.explanation,
            "plan": explain_plan(plan),
        },
        "steps": len(counted),
        "lanes": summarise(window, begin, end),
        "verbs_alone": summarise(alone, alone[0].start_seconds, alone[-1].stop_seconds)["verbs"],
        # Updates run behind backward, or where gradients wait for the norm behind the next forward.
        "interference": interference(
            window,
            alone,
            plan,
            Verb.FORWARD if plan.updates.policy == "deferred" else Verb.BACKWARD,
            cores_of(plan, machine),
            machine.slowdowns.get(Lane.COMPUTE, {}),
        ),
        "update_bytes_per_second": {"together": median_rate(window, Verb.UPDATE), "alone": median_rate(alone, Verb.UPDATE)},
    }


def cores_of(plan: Plan, machine: Ceilings) -> Cores:
    """Return what works on the cores. A GPU's compute does not, nor do its copies."""
    on_cores = (
        {} if machine.has_device else {Lane.COMPUTE: plan.compute_threads, Lane.DEVICE_TO_HOST: 1, Lane.HOST_TO_DEVICE: 1}
    )
    per_gigabyte = [drive.io_cpu_seconds_per_gigabyte or 0.0 for drive in machine.drives]
    return Cores(
        count=machine.cores,
        threads={Lane.UPDATE: plan.updates.threads, **on_cores},
        seconds_per_ssd_byte=sum(per_gigabyte) / max(1, len(per_gigabyte)) / 1e9,
    )


if __name__ == "__main__":
    main()
