"""One row out of core: a pass beside reading alone and computing alone, and how busy the drive is.

    python bench/overlap.py --scratch DISK [--rounds 5] [--output RESULTS.json]

The model of `offload.py`, one row, room for two or three blocks more than it takes, no device. In turn: passes of a
generation; the same bytes read by as many threads as the lane has, with nothing beside; passes with all weights in memory. The
aim is a pass of at most 1.1 times the longer of the last two (1.3 where both are about equal), and the lane that the plan names
busy for 95 % of it.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from launch import machine_facts, require_disk, scratch_directory

MIB = 2**20
NEW_TOKENS, PROMPT_TOKENS = 10, 32
# The prompt's pass, and the one after, in which buffers come to their places.
FIRST = 2


def busy_share(spans: Sequence[tuple[float, float]], start: float, stop: float) -> float:
    """Return the share of the time from `start` to `stop` in which one of the spans goes on."""
    total, reached = 0.0, start
    for begin, end in sorted(spans):
        total += max(0.0, min(end, stop) - max(begin, reached))
        reached = max(reached, min(end, stop))
    return total / (stop - start)


def passes_of(generator: Any, prompt: list[int], events: list[Any]) -> dict[str, float]:
    """Return the median seconds of a pass, turn included, and how busy reads and compute were, after the first passes."""
    from headrace.terms.lanes import Lane
    from headrace.terms.program import Verb

    events.clear()
    asked = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    list(generator.generate([prompt], **asked))
    ends = [event.stop_seconds for event in events if event.verb is Verb.TURN][FIRST - 1 :]
    found = {"pass_seconds": median(later - sooner for sooner, later in pairwise(ends))}
    for name, lane in (("reads", Lane.SSD_READ), ("compute", Lane.COMPUTE)):
        spans = [(event.start_seconds, event.stop_seconds) for event in events if event.lane is lane]
        found[name] = busy_share(spans, ends[0], ends[-1])
    return found


def main() -> None:
    """Print what was found, and write each round as JSON where asked."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--model", type=Path, help="the model that offload.py made; made anew without it")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--output", type=Path)
    options = arguments.parse_args()
    import headrace

    headrace.set_process_defaults()
    from offload import make_model, prompts

    from headrace import Budget
    from headrace.generate.passes.generator import Generator
    from headrace.machine.host_memory import huge_page_buffer
    from headrace.terms.errors import PlanInfeasible
    from headrace.terms.events import OpDone
    from headrace.terms.lanes import Lane

    events: list[Any] = []

    def note(event: Any) -> None:
        if isinstance(event, OpDone):
            events.append(event)

    with scratch_directory(options.scratch) as scratch, contextlib.ExitStack() as stack:
        require_disk(scratch, 2 * 10**9, "the model")
        model = options.model or scratch / "model"
        if not model.exists():
            make_model(model)
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        prompt, least = prompts(1)[0], 0
        with Generator.open(model, Budget(host=str(64 * MIB))) as generator:
            try:
                generator.plan_only(1, PROMPT_TOKENS, NEW_TOKENS)
            except PlanInfeasible as refusal:
                least = refusal.needed_bytes + 192 * MIB
        open_ = [
            stack.enter_context(Generator.open(model, Budget(host=str(budget)), sink=note))
            for budget in (least, least + 3 * size)  # the second is counted with what the first has taken
        ]
        for generator in open_:
            generator.prepare(1, PROMPT_TOKENS, NEW_TOKENS)
            passes_of(generator, prompt, events)
        out, cached = open_
        assert out.plan is not None, "prepared"
        units = out.plan.num_blocks + 1 - min(out.plan.host_slots, out.plan.num_blocks)
        buffers = [huge_page_buffer(out.plan.largest(out.plan.stored_bytes)) for _ in range(Lane.SSD_READ.row.threads)]
        rounds = []
        with ThreadPoolExecutor(len(buffers)) as threads:
            for _ in range(options.rounds):
                found = passes_of(out, prompt, events)
                start = time.perf_counter()
                reads = [
                    threads.submit(out.model.source.read, 1 + unit, buffers[unit % len(buffers)][: out.plan.stored_bytes(1)])
                    for unit in range(units)
                ]
                for read in reads:
                    read.result()
                found["reading_alone"] = time.perf_counter() - start
                found["computing_alone"] = passes_of(cached, prompt, events)["pass_seconds"]
                rounds.append(found)
                print(json.dumps(found), flush=True)
    of = {name: median(found[name] for found in rounds) for name in rounds[0]}
    bound = [found["pass_seconds"] / max(found["reading_alone"], found["computing_alone"]) for found in rounds]
    if options.output is not None:
        record = {"machine": machine_facts(options.scratch), "rounds": rounds}
        options.output.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(
        f"a pass {of['pass_seconds']:.3f} s, reading alone {of['reading_alone']:.3f} s, computing alone "
        f"{of['computing_alone']:.3f} s: {median(bound):.2f} of the longer ({min(bound):.2f} to {max(bound):.2f}); reads busy "
        f"{of['reads']:.0%}, compute {of['compute']:.0%}"
    )


if __name__ == "__main__":
    main()
