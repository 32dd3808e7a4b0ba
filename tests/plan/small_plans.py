"""Small plans for tests, without a model."""

from dataclasses import fields
from typing import Any

from plan_changes import plan_of_fields

from headrace.plan.value.plan import Plan
from headrace.plan.value.results import Results
from headrace.terms.forms import UnitFigures, home_of
from headrace.update import rule_of
from headrace.update.rules.adamw import AdamW


def small_plan(num_blocks: int = 4, **changes: Any) -> Plan:
    units = num_blocks + 2
    values: dict[str, Any] = {
        "compute_dtype": "bfloat16",
        "gradient_dtype": "bfloat16",
        "separate_device": False,
        "units": tuple(
            UnitFigures(name=f"unit{index}", num_elements=8192, num_parameters=8000, home=home_of(index, num_blocks))
            for index in range(units)
        ),
        "num_blocks": num_blocks,
        "tied": False,
        "sequence_length": 64,
        "tokens_per_step": 128,
        "micro_batch_sequences": 1,
        "num_micro_batches": 2,
        "hidden_size_bytes": 128,
        "loss_chunk_tokens": 64,
        "update_policy": "immediate",
        "held_gradients": "host",
        "checkpoint_every": 1,
        "host_slots": 3,
        "device_slots": 0,
        "prefetch": 1,
        "chunk_elements": 4096,
        "state_slots": 3,
        "gradient_slots": 2,
        "resident_states": (),
        "stash_tiers": ("device",) * num_blocks,
        "stash_slots": 0,
        "kept": ((),) * num_blocks,
        "kept_bytes": (0,) * num_blocks,
        "skipped": ((),) * num_blocks,
        "operators": ((),) * num_blocks,
        "accumulate": True,
        "compute_threads": 1,
        "update_threads": 1,
        "forward_flops": (0.0,) + (1e6,) * num_blocks + (0.0,),
        "epilogue_flops": 1e6,
    }
    values.update(changes)
    values.setdefault("rule", rule_of(AdamW(moments=values.pop("moments", "float32")), values["compute_dtype"]).figures)
    values.setdefault("late_units", tuple(range(units)) if values["update_policy"] == "deferred" else ())
    results = {field.name: values.pop(field.name) for field in fields(Results) if field.name in values}
    return plan_of_fields(**values, results=Results(**results))
