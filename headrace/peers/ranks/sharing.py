"""How a run is shared out among ranks at its beginning: each rank's share of a step, and the plan of all.

Rank 0 tells the others of the model what they must know, so that they need no copy of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.ask.planner import RunPlanner
from headrace.engine.subject import Subject
from headrace.files import Beside
from headrace.flow.weights.arena import TORCH_DTYPES
from headrace.machine.host_memory import Bytes
from headrace.peers.meet.talk import LEADER, VERSIONS, Talk
from headrace.plan.search.serving import grouping_of
from headrace.plan.value.plan import Plan
from headrace.store import StateStore
from headrace.terms.cuts import least_chunk_elements
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UNIT_ALIGNMENT
from headrace.terms.options.options import Options
from headrace.terms.options.summing import order_of, shares_of
from headrace.terms.sizes import MIB, round_up

# So many chunks of the largest block each rank has at least, so that all have equally much to read, update and write.
_CHUNKS_PER_RANK = 2
_PIECE_BYTES = 16 * MIB
_CONFIGURATION = ("config.json", "model.safetensors.index.json")


def planned_options(options: Options, fleet: Talk) -> Options:
    """Return the options under which a rank plans. Gradients that ranks add are rounded afterwards, not before."""
    return options if fleet.by_stages else replace(options, gradient_dtype="float32")


def share_of_step(
    planner: RunPlanner, fleet: Talk, step: tuple[int, int], way: str, *, state: Sequence[Path], beside: Beside | None
) -> tuple[int, int]:
    """Return the tokens of the largest rank's share of a step, and their rows' length; fix how sums are grouped.

    Raises:
        ConfigError: a step has fewer micro-batches than there are ranks.
    """
    if fleet.by_stages:
        return step
    tokens, length = step
    sequences = tokens // length
    if planner.grouping is None:
        rows = max(1, sequences // fleet.size)
        found = grouping_of(planner.plan(rows * length, length, state=state, beside=beside))
        assert found is not None, "a plan that computes groups sums"
        planner.group(found)
    assert planner.grouping is not None, "it was just given"
    rows = planner.grouping.rows
    num_micro = -(-sequences // rows)
    if num_micro < fleet.size:
        raise ConfigError(
            f"tokens_per_step: a step of {sequences} rows has {num_micro} micro-batches of {rows} rows, too few for "
            f"{fleet.size} ranks; give more tokens_per_step, or start fewer ranks"
        )
    most = max(map(len, shares_of(num_micro, order_of(num_micro, fleet.size, way), way).values()))
    return most * rows * length, length


def shared_plan(plan: Plan, fleet: Talk) -> Plan:
    """Return a plan whose chunks are so small that every rank has some of each block. A stage has whole units."""
    if fleet.by_stages:
        return plan
    num_ranks = fleet.size
    largest = max(
        unit.update_elements if unit.update_elements else unit.num_elements for unit in plan.units[1:-1] or plan.units
    )
    even = round_up(-(-largest // (num_ranks * _CHUNKS_PER_RANK)), UNIT_ALIGNMENT)
    least = max(least_chunk_elements(unit.cuts) for unit in plan.units)
    return plan.with_updates(chunk_elements=min(plan.updates.chunk_elements, max(even, least)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What rank 0 tells the others: the options and the plan, where they find or make their part, and the commit to open
    (None: it begins).

    `record` is what the first commit of a part says, None for that of a run without steps. `model` is a directory with the
    model's configuration, and weight files of holes.
    """

    options: Options
    plan: Plan
    run_id: str
    base: Path
    model: Path
    at: int | None
    record: Mapping[str, Any] | None
    wire: str

    @property
    def name(self) -> str:
        """The name of this rank's folder."""
        return f"headrace-{self.run_id}"


def introduce(
    fleet: Talk,
    subject: Subject,
    store: StateStore,
    options: Options,
    plan: Plan | None,
    *,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Tell the other ranks about the run that begins, or goes on, in `store`; from here on they take part. With a `record` the
    run goes on in a new store, whose first commit that is.

    Raises:
        ConfigError: there is no plan, because the size of a step is not given.
    """
    if plan is None:
        raise ConfigError("tokens_per_step: ranks share out steps of a known size; give it")
    fleet.adopt(store)
    fleet.dtype = TORCH_DTYPES[options.gradient_dtype or options.compute_dtype]
    versions = store.record.get(VERSIONS)
    files = {tensor.path for tensor in subject.checkpoint.tensors.values()}
    words = {
        "options": options.to_record(),
        "ssd": list(map(str, options.budget.ssd)),
        "output": str(options.output or store.manifest.directories[0]),
        "plan": plan.to_json(),
        "record": record,
        "run_id": store.manifest.run_id,
        "wire": subject.seams.wire.name,
        "terms": fleet.terms,
        "texts": {
            name: (subject.directory / name).read_text(encoding="utf-8")
            for name in _CONFIGURATION
            if (subject.directory / name).exists()
        },
        "weights": {path.name: [_header_bytes(path), path.stat().st_size] for path in sorted(files)},
    }
    for rank in fleet.ranks.others:
        fleet.ranks.control.send_message({**words, "at": versions[rank - 1] if versions else None}, rank)
        for path in sorted(files):
            with path.open("rb") as file:
                head = np.frombuffer(file.read(_header_bytes(path)), np.uint8).copy()
            fleet.ranks.control.send(head, rank)


def be_introduced(fleet: Talk, place: Callable[[Mapping[str, Any]], Path]) -> Introduction:
    """Return what rank 0 tells. `place` gets that, and returns a folder for what belongs to this rank of that run."""
    words = fleet.ranks.control.receive_message(LEADER)
    base = place(words)
    model = base / "model"
    model.mkdir(parents=True, exist_ok=True)
    for name, text in words["texts"].items():
        (model / name).write_text(text, encoding="utf-8")
    for name, (head, size) in words["weights"].items():
        content: Bytes = np.empty(head, np.uint8)
        fleet.ranks.control.receive(content, LEADER)
        with (model / name).open("wb") as file:
            file.write(content.tobytes())
            file.truncate(size)
    options = Options.from_record(words["options"])
    options = replace(options, output=base / "run", ssd=tuple(map(Path, words["ssd"])))
    fleet.dtype = TORCH_DTYPES[options.gradient_dtype or options.compute_dtype]
    fleet.agree(words["terms"], options)
    return Introduction(
        options=options,
        plan=Plan.from_json(words["plan"]),
        run_id=words["run_id"],
        base=base,
        model=model,
        at=words["at"],
        record=words["record"],
        wire=words["wire"],
    )


def _header_bytes(path: Path) -> int:
    """Return the bytes of a safetensors file that say where its tensors lie."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def own_part(data: Any, share: range) -> Any:
    """Return the micro-batches `share` of a batch, whose trained tokens stay those of the whole."""
    here = slice(share.start, share.stop)
    return replace(
        data,
        micro_batches=data.micro_batches[here],
        targets=data.targets[here],
        trained_columns=data.trained_columns[here],
    )
