"""A run of ranks goes on with another number of them: its state is shared out anew, chunk by chunk, before the next step.

Rank 0 reads the parts of all ranks, which must lie on its machine, and gives each rank its new one. Chunks stay as they were
cut, and sums are grouped as before, so bits do not change. Invariant: until all new parts are committed the old ones are the
run (`store.replacing`).
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headrace.ask.planner import RunPlanner
from headrace.engine.subject import Subject
from headrace.engine.tuning import tune
from headrace.machine.host_memory import huge_page_buffer
from headrace.peers.ranks.fleet import VERSIONS, Fleet
from headrace.plan.search.serving import grouping_of
from headrace.plan.value.plan import Plan
from headrace.store import StateStore, discard_store, finish_replacing, place_of_new, replace_store
from headrace.store.shard_store import ShardStore
from headrace.terms.errors import ConfigError, RunDirectoryError
from headrace.terms.events import Notice, Planned, Sink
from headrace.terms.options.options import Options
from headrace.terms.shards import Share


def taken_up(
    fleet: Fleet,
    run_directory: Path,
    subject: Subject,
    planner: RunPlanner,
    store: StateStore,
    options: Options,
    plan: Plan | None,
    sink: Sink,
) -> tuple[StateStore, Plan | None]:
    """Have all ranks, or stages, go on with the run in `store`; return rank 0's store and plan, which are new where another
    number of ranks goes on. Raises as `_reshare`.
    """
    if not fleet.by_stages:
        _discard_attempt(run_directory, fleet, store, options)
        if _shared_by(store) != fleet.size:
            return _reshare(fleet, run_directory, subject, planner, store, options, plan, sink)
    fleet.introduce(subject, store, options, plan)
    return store, plan


def _shared_by(store: StateStore) -> int:
    """Return how many ranks share out the state of a run."""
    return int(store.manifest.identity.get("ranks") or 1)


def _reshare(
    fleet: Fleet,
    run_directory: Path,
    subject: Subject,
    planner: RunPlanner,
    store: StateStore,
    options: Options,
    plan: Plan | None,
    sink: Sink,
) -> tuple[ShardStore, Plan]:
    """Share out the run in `store` among the ranks of `fleet`; return rank 0's new store, and the plan of a step.
    `store` is closed.

    Raises:
        RunDirectoryError: a rank's part is not on this machine. ConfigError: a step is too small for so many ranks.
        DiskFull: there is no space for old and new parts together. The run is then as it was.
    """
    size = _shared_by(store)
    if plan is None or options.tokens_per_step is None:
        raise ConfigError(f"{run_directory}: its ranks have taken no step; resume it with {size} ranks")
    new = _new_plan(planner, fleet, store, options, plan)
    folders = [fleet.folder_of(_told(store, options), rank) for rank in range(1, size)]
    sink(Notice(text=f"{size} ranks shared out the state, now {fleet.size} do: its parts are written anew", level="info"))
    with ExitStack() as opened:
        old = [
            store,
            *(
                _opened(folder, version, sink, opened, size)
                for folder, version in zip(folders, store.record[VERSIONS], strict=True)
            ),
        ]
        made = subject.create_store(place_of_new(run_directory), store.manifest.directories, None, new, sink)
        assert isinstance(made, ShardStore), "a rank's store"
        with ExitStack() as undo:
            undo.callback(made.remove)
            record = {**store.record, "plan": new.to_json()}
            record.pop(VERSIONS)
            fleet.introduce(subject, made, options, new, record=record)
            with fleet.reaching(made, importing=True):
                _copy(old, made, size)
                made.commit(record)
            undo.pop_all()
        made.close()
        replace_store(run_directory, store.manifest, folders)
    store.close()
    finish_replacing(run_directory)
    found = ShardStore.open(run_directory, sink=sink)
    subject.use_lent(found, sink)
    fleet.adopt(found)
    tune(found, options.machine)
    sink(Planned(plan=new))
    return found, new


def _new_plan(planner: RunPlanner, fleet: Fleet, store: StateStore, options: Options, plan: Plan) -> Plan:
    """Return the plan of the largest new share of a step: other rows, the same sums, chunks and length."""
    grouping = grouping_of(plan)
    assert grouping is not None, "a plan that computes groups sums"
    assert options.tokens_per_step is not None, "ranks share out steps of a known size"
    planner.group(grouping)
    step = options.tokens_per_step, plan.batch.sequence_length
    share = fleet.share_of_step(planner, step, options.gradient_sum, state=(), beside=None)
    return planner.plan(*share, state=store.manifest)


def _told(store: StateStore, options: Options) -> dict[str, Any]:
    """Return of what the other ranks were told what decides where their parts lie."""
    output = str(options.output or store.manifest.directories[0])
    return {"ssd": list(map(str, options.budget.ssd)), "output": output, "run_id": store.manifest.run_id}


def _opened(folder: Path, version: int, sink: Sink, closers: ExitStack, size: int) -> ShardStore:
    """Open another rank's part, and check all of it."""
    try:
        found = ShardStore.open(folder / "run", sink=sink, at=version)
    except RunDirectoryError as error:
        raise RunDirectoryError(
            f"{folder}: a rank's part of the state is not here ({error}). Another number of ranks can go on where all parts "
            f"lie on one machine; resume the run with {size} ranks"
        ) from error
    closers.callback(found.close)
    found.verify()
    return found


def _discard_attempt(run_directory: Path, fleet: Fleet, store: StateStore, options: Options) -> None:
    """Remove what an attempt to share out the run in `store` anew has left, if one was killed.

    Raises:
        StorageError: something cannot be removed.
    """
    new = place_of_new(run_directory)
    if new.exists() and (run_id := discard_store(new)) is not None:
        pattern = fleet.folder_of({**_told(store, options), "run_id": run_id}, 0)
        for folder in pattern.parent.glob(pattern.name.replace("rank-0", "rank-*")):
            discard_store(folder / "run")
            discard_store(folder)


def _copy(old: Sequence[StateStore], made: ShardStore, size: int) -> None:
    """Copy every chunk that commits make durable from the rank that held it to the one that holds it now."""
    for unit, described in enumerate(made.manifest.units):
        for family in described.families:
            if not family.durability.committed:
                continue
            for chunk in range(family.num_chunks):
                content = huge_page_buffer(family.chunk_bytes(chunk))
                old[Share(0, size).holder(family.num_chunks, unit, chunk)].read(unit, family.name, content, chunk).wait()
                made.write(unit, family.name, chunk, content).wait()
