"""A short run of the engine, for tests that compare losses and final weights."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from plan_changes import changed
from safetensors.torch import load_file

import headrace
from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine
from headrace.plan.value.plan import Plan
from headrace.plan.value.results import Results
from headrace.terms.events import Sink


def short_run(
    path: Path,
    run_directory: Path,
    batches: Sequence[dict[str, torch.Tensor]],
    *,
    adjust: dict[str, Any] | None = None,
    inspect: Callable[[Engine], None] | None = None,
    export: Path | None = None,
    sink: Sink | None = None,
    seams: Seams | None = None,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and final weights of a run over `batches`, without clipping if `options` do not say so.

    `adjust` replaces fields of the plan, by values or by functions of it; `inspect` sees the engine before it is closed;
    `seams` are what is exchanged in it.
    """

    def adjust_plan(plan: Plan) -> Plan:
        changes = {name: value(plan) if callable(value) else value for name, value in (adjust or {}).items()}
        results = {field.name: changes.pop(field.name) for field in dataclasses.fields(Results) if field.name in changes}
        return changed(plan.with_results(**results), **changes)

    rows, length = batches[0]["input_ids"].shape
    given: dict[str, Any] = {"host_memory": "4GiB", "max_grad_norm": None}
    out = export or run_directory.parent / f"{run_directory.name}-out"
    with Engine.open(
        path,
        headrace.Options(
            output=run_directory,
            tokens_per_step=rows * length,
            sequence_length=length,
            **{"learning_rate": 1e-3, "weight_decay": 0.1} | given | options,
        ),
        sink,
        adjust_plan=adjust_plan,
        seams=seams,
    ) as engine:
        losses = [engine.step(batch).loss for batch in batches]
        if inspect is not None:
            inspect(engine)
        engine.save_pretrained(out)
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted(out.glob("*.safetensors")):
        weights |= load_file(shard)
    return losses, weights
