"""A training process to be killed: opens or resumes a run, steps to the end, exports.

It makes the file `ready` in the run's parent when the engine is open. The data position travels in the record, so a resumed run
goes on with the next batch.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from forked import kill_at
from plan_changes import changed

import headrace
from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine
from headrace.model.by_rows import block_tables
from headrace.model.parts import head_rows
from headrace.plan.value.plan import Plan
from headrace.terms.embedding_rows import EmbeddingRows
from headrace.terms.errors import PlanInfeasible
from headrace.testing import GroupedCodec, RowWire, item_rules


def batch(seed: int, vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, vocabulary, (4, 24), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def speculative(plan: Plan) -> Plan:
    """Half of the units behind backward, as if nothing were clipped; the other half behind the next forward."""
    plan = plan.with_results(speculation=None)
    return changed(plan, update_policy="speculative", late_units=(0, 2), resident_states=())


def split(plan: Plan) -> Plan:
    """Micro-batches of a row each, so that one is held out at a check."""
    return changed(plan, micro_batch_sequences=1, num_micro_batches=4, accumulate=True)


def another(plan: Plan, number: int) -> Plan:
    """One of two plans that put everything elsewhere: on drives, or in memory."""
    blocks, every = plan.num_blocks, tuple(range(len(plan.units)))
    elsewhere: list[dict[str, Any]] = [
        {"stash_tiers": ("ssd",) * blocks, "stash_slots": 2, "held_gradients": "ssd", "resident_states": (), "host_slots": 2},
        {"resident_states": every, "host_slots": blocks},
    ]
    return changed(plan, prefetch=1, **elsewhere[number % 2])


def deferred(plan: Plan) -> Plan:
    """One row at a time, and no guesses: a plan with both policies changes by itself."""
    return split(plan.with_results(speculation=None))


def by_rows(plan: Plan) -> Plan:
    """Rows of the embedding are read in the model's file, and the head comes for the loss only."""
    return replace(plan, visiting_head="ssd", embedding=EmbeddingRows(rows=384, stored_bytes=128, computed_bytes=128))


def head_comes(plan: Plan) -> Plan:
    """A frozen head comes for the loss only, a range of its rows and two pages at a time."""
    return replace(deferred(plan), visiting_head="ssd", head_slot_bytes=RANGE_ROWS * 64 * 2 + 8192)


def in_parts(model: str, options: headrace.Options) -> headrace.Options:
    """Return options with so little device memory that blocks come in parts."""
    try:
        Engine.open(model, replace(options, device_memory="1B")).close()
    except PlanInfeasible as refusal:
        return replace(options, device_memory=refusal.needed_bytes)
    raise AssertionError("a byte of device memory was enough")


ADJUST = {
    "speculative": speculative,
    "rows": speculative,
    "lsp": split,
    "experts": split,
    "one plan": deferred,
    "plans": deferred,
    "embedding": by_rows,
    "trained embedding": deferred,
    "parts": deferred,
    "head by ranges": deferred,
    "head that comes": head_comes,
}
RANGE_ROWS = 128  # of a head of 384
WAYS = {
    "lsp": {"gradient": "lsp:dimension=32,nonzeros=4,check=2,alpha=0.05", "train": "matrices"},
    "adapters": {"adapter": "dora:rank=4"},
    "embedding": {"adapter": "lora:rank=4"},
    "trained embedding": {"gradient": "rows"},
    "tables": {"adapter": "table:rows=64,layers=0+2,top=4"},
    "experts": {"device_memory": "1GiB"},
    "tables in blocks": {"adapter": "lora:rank=4"},
    "tables by rows": {"gradient": "rows:tables=blocks"},
    "head that comes": {"adapter": "lora:rank=4"},
}


def main(model: str, run: str, out: str, steps: int, policy: str, optimizer: str = "adamw", moment: str = "") -> None:
    item_rules.register()
    if moment:
        kill_at(moment)
    torch.set_num_threads(1)
    run_directory = Path(run)
    if policy == "tables in blocks":
        block_tables.LEAST_BYTES = 0  # each is large
    if policy.startswith("head"):
        head_rows._RANGE_ELEMENTS = RANGE_ROWS * 64
    # Frozen weights that are coded, with a trained family beside them; or everything trained in place.
    seams = {"rows": Seams(RowWire(), GroupedCodec()), "experts": Seams(parted=True)}.get(policy)
    if (run_directory / "commit.0").exists():
        engine = Engine.resume(run_directory, seams=seams)
        assert engine.step_index == 0 or engine.position == {"next": engine.step_index}
    else:
        options = headrace.Options(
            host_memory="2GiB",
            learning_rate=1e-3,
            weight_decay=0.1,
            output=run_directory,
            max_grad_norm=None if policy == "immediate" else 0.5,
            optimizer=optimizer,
            checkpoint_every=3 if policy == "seldom" else None,
            tokens_per_step=96,
            sequence_length=24,
            **WAYS.get(policy, {}),
        )
        if policy == "parts":
            options = in_parts(model, options)
        engine = Engine.open(model, options, adjust_plan=ADJUST.get(policy), seams=seams)
        assert engine.plan is not None
        assert (engine.plan.parts is not None) == (policy == "parts")
        assert len(engine.plan.results.tables) == 2 * policy.startswith("tables ")
        assert (engine.chain.head_rows == RANGE_ROWS) == policy.startswith("head")
    with engine:
        (run_directory.parent / "ready").touch()
        while engine.step_index < steps:
            seed = engine.step_index
            engine.step(batch(seed, engine.chain.config.vocab_size), position={"next": seed + 1})
            if policy == "plans":
                assert engine.plan is not None
                assert engine.take_plan(another(engine.plan, seed))
        engine.save_pretrained(out)
