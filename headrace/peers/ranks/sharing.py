"""What a rank hears of a run as it begins (`Fleet.introduce`): of the model so much that it needs no copy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.flow.weights.arena import TORCH_DTYPES
from headrace.peers.meet.talk import hear
from headrace.peers.ranks.fleet import LEADER, Fleet
from headrace.plan.value.plan import Plan
from headrace.terms.options.options import Options


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


def be_introduced(fleet: Fleet, place: Callable[[Mapping[str, Any]], Path]) -> Introduction:
    """Return what rank 0 tells. `place` gets that, and returns a folder for what belongs to this rank of that run."""
    words, heads = hear(fleet.ranks.control, LEADER)
    base = place(words)
    model = base / "model"
    model.mkdir(parents=True, exist_ok=True)
    for name, text in words["texts"].items():
        (model / name).write_text(text, encoding="utf-8")
    for name, size in words["weights"].items():
        with (model / name).open("wb") as file:
            file.write(heads[name].numpy().tobytes())
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


def own_part(data: Any, share: range) -> Any:
    """Return the micro-batches `share` of a batch, whose trained tokens stay those of the whole."""
    here = slice(share.start, share.stop)
    return replace(
        data,
        micro_batches=data.micro_batches[here],
        targets=data.targets[here],
        trained_columns=data.trained_columns[here],
    )
