"""Ranks that share out every unit, for tests: threads of this process, all over loopback."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from crew import node_options, weights_of
from torch.distributed import HashStore

from headrace.engine.fleet import Fleet
from headrace.engine.seams import Seams
from headrace.engine.sharded import ShardedEngine, join
from headrace.net import Ranks
from headrace.plan.plan import Plan


def ranks_run(
    path: Path,
    output: Path,
    batches: Sequence[dict[str, torch.Tensor]],
    size: int,
    *,
    plan: Plan | None = None,
    drive: Callable[[ShardedEngine], None] = lambda engine: None,
    resume: bool = False,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and final weights of a run over `batches` on `size` ranks. `drive` is called with rank 0's engine at the
    end.
    """
    store, errors = HashStore(), list[BaseException]()

    def meet(rank: int) -> Fleet:
        return Fleet(Ranks(store, rank, size, host="127.0.0.1"))

    def follow(rank: int) -> None:
        try:
            with join(meet(rank), lambda told: output.parent / f"{output.name}-rank-{rank}", lambda event: None) as engine:
                engine.follow()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    seams = Seams(fleet=meet(0))
    out = output.parent / f"{output.name}-out"
    if resume:
        opened = ShardedEngine.resume(output, seams=seams)
    else:
        opened = ShardedEngine.open(path, node_options(output, batches, **options), plan=plan, seams=seams)
    with opened as engine:
        losses = [engine.step(batch).loss for batch in batches]
        drive(engine)
        engine.save_pretrained(out)
    for thread in threads:
        thread.join(200)
    assert errors == []
    return losses, weights_of(out)
