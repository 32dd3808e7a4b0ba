"""Trains for a few steps in a process of its own that has imported nothing yet, and prints its plan's peaks as JSON.

Asked for the least budget (`host_bytes` null), it lets the planner refuse until it names one that it accepts.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import headrace
import headrace.ask.planner
from headrace.engine.trainer import Engine
from headrace.machine.host_memory import anonymous_bytes
from headrace.plan.search.paging import paged
from headrace.plan.value.plan import Plan
from headrace.terms.errors import PlanInfeasible
from headrace.testing import item_rules

# What the interpreter may hold more at one opening than at the one before.
BETWEEN_OPENINGS_BYTES = 1 << 20


def open_engine(case: dict[str, Any]) -> tuple[Engine, int]:
    """Return the engine and the host budget that it runs in."""
    host_bytes = case["host_bytes"] or 1
    for _ in range(8):
        try:
            engine = Engine.open(
                case["model"],
                headrace.Options(
                    host_memory=host_bytes,
                    device_memory=case["device_bytes"],
                    learning_rate=1e-3,
                    output=case["run"],
                    max_grad_norm=case["clip"],
                    compute_dtype=case["dtype"],
                    optimizer=case["optimizer"],
                    adapter=case["adapter"],
                    tokens_per_step=case["tokens"],
                    sequence_length=case["length"],
                ),
                adjust_plan=in_pages if case["in_pages"] else None,
            )
            return engine, host_bytes
        except PlanInfeasible as refusal:
            if case["host_bytes"] or refusal.tier != "host":
                raise
            host_bytes = refusal.needed_bytes + BETWEEN_OPENINGS_BYTES
    raise AssertionError(f"the planner refuses the {host_bytes} bytes that it asked for")


def in_pages(plan: Plan) -> Plan:
    """Let weights of blocks come in pages, one row at a time, and their inputs be read from drives early."""
    rows = plan.batch.micro_batch_sequences * plan.batch.num_micro_batches
    batch = replace(plan.batch, micro_batch_sequences=1, num_micro_batches=rows)
    stash = replace(plan.stash, tiers=("ssd",) * plan.num_blocks, slots=2)
    return paged(replace(plan, batch=batch, stash=stash).with_gradients(accumulate=True), lean=True)


def litter() -> None:
    """Make each search for a plan leave 128 MiB in objects that refer to one another."""
    search = headrace.ask.planner.make_plan

    def littering(*arguments: Any) -> Any:
        before, cycle = anonymous_bytes(), []
        while anonymous_bytes() < before + (128 << 20):
            cycle += [[cycle] for _ in range(10_000)]
        return search(*arguments)

    headrace.ask.planner.make_plan = littering


def main() -> None:
    case = json.loads(sys.argv[1])
    item_rules.register()
    if case["littered"]:
        litter()
    engine, host_bytes = open_engine(case)
    with engine:
        opened_bytes = anonymous_bytes()
        positions = torch.arange(case["length"]) % (case["packed"] or case["length"])
        positions = positions.expand(case["tokens"] // case["length"], -1)
        for seed in range(case["steps"]):
            ids = torch.randint(2, 4000, positions.shape, generator=torch.Generator().manual_seed(seed))
            batch = {"input_ids": ids, "labels": ids}
            if case["packed"]:
                batch["position_ids"] = positions
            if case["padded"]:
                seen, trained = (torch.arange(case["length"]) < end for end in (case["length"] - 16, 128))
                batch |= {"attention_mask": seen.long().expand_as(ids), "labels": ids.where(trained, -100)}
            engine.step(batch)
        plan = engine.plan
        if case["exported"]:
            engine.save_pretrained(Path(case["run"]).with_name("exported"))
    assert plan is not None
    assert plan.batch.pages or not case["in_pages"]
    rows = {tier: plan.results.peak_bytes[tier] for tier in plan.results.peak_bytes if tier != "ssd"}
    print(
        json.dumps({"host_bytes": host_bytes, "rows": rows, "opened_bytes": opened_bytes, "in_parts": plan.parts is not None})
    )


if __name__ == "__main__":
    main()
