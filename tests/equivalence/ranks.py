"""Ranks of one run, and its stages, for tests: threads of this process, all over loopback."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from crew import node_options, weights_of
from plan_changes import changed
from torch.distributed import HashStore

from headrace.engine.seams import Seams
from headrace.peers.meet.ranks import Ranks
from headrace.peers.ranks.fleet import Fleet
from headrace.peers.ranks.sharded import ShardedEngine, join_as_rank
from headrace.peers.stages.line import LANES, Line
from headrace.peers.stages.staged import StagedEngine
from headrace.plan.value.plan import Plan
from headrace.terms.events import Sink, StepResult

Batches = Sequence[dict[str, torch.Tensor]]
Weights = dict[str, torch.Tensor]


def ranks_run(
    path: Path, output: Path, batches: Batches, size: int, machines: Sequence[Sequence[int]] = (), **given: Any
) -> tuple[list[float], Weights]:
    """Return losses and final weights of a run over `batches` on `size` ranks that share out every unit; `machines` are the
    ranks that have a host copy together, by machine. See `_run`.
    """

    def folder_of(told: Mapping[str, Any], rank: int) -> Path:
        return output.parent / f"{output.name}-rank-{rank}-{told['run_id']}"

    def meet(store: HashStore, rank: int) -> Fleet:
        ours = next((each for each in machines if rank in each), ())
        return Fleet(Ranks(store, rank, size, host="127.0.0.1", machine=ours), folder_of)

    results, weights = _run(path, output, batches, [meet] * size, ShardedEngine, **given)
    return [result.loss for result in results], weights


def staged_run(path: Path, output: Path, batches: Batches, size: int, **given: Any) -> tuple[list[StepResult], Weights]:
    """Return the results and final weights of a run over `batches` in `size` stages. See `_run`."""

    def meet(store: HashStore, stage: int) -> Line:
        return Line(Ranks(store, stage, size, host="127.0.0.1", lanes=LANES))

    return _run(path, output, batches, [meet] * size, StagedEngine, **given)


def _run(
    path: Path,
    output: Path,
    batches: Batches,
    meet: Sequence[Callable[[HashStore, int], Fleet]],
    kind: type[ShardedEngine],
    *,
    adjust: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    drive: Callable[[Any], None] = lambda engine: None,
    resume: bool = False,
    sink: Sink = lambda event: None,
    **options: Any,
) -> tuple[list[StepResult], Weights]:
    """Run engines of a `kind`, which `meet`. `adjust` replaces fields of the plan; `drive` gets rank 0's engine at the end, and
    `sink` its events.
    """
    store, errors = HashStore(), list[BaseException]()

    def adjust_plan(plan: Plan) -> Plan:
        changes = {name: value(plan) if callable(value) else value for name, value in (adjust or {}).items()}
        return changed(plan, **changes)

    def follow(rank: int) -> None:
        try:
            fleet = meet[rank](store, rank)
            folder = output.parent / f"{output.name}-rank-{rank}"
            by_run = not fleet.by_stages
            with join_as_rank(
                fleet, lambda told: fleet.folder_of(told, rank) if by_run else folder, lambda event: None, kind
            ) as engine:
                engine.follow()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, len(meet))]
    for thread in threads:
        thread.start()
    leader = meet[0](store, 0)
    seams, out = Seams(fleet=leader), output.parent / f"{output.name}-{'later' if resume else 'out'}"
    try:
        if resume:
            opened = kind.resume(output, seams=seams, sink=sink)
        else:
            given = node_options(output, batches, **options)
            opened = kind.open(path, given, sink, plan=plan, adjust_plan=adjust_plan if adjust else None, seams=seams)
    except BaseException:
        leader.ranks.close()
        for thread in threads:
            thread.join(200)
        raise
    with opened as engine:
        results = [engine.step(batch) for batch in batches]
        drive(engine)
        engine.save_pretrained(out)
    for thread in threads:
        thread.join(200)
    assert errors == []
    return results, weights_of(out)
