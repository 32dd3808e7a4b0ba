"""What a node keeps of learners that train by themselves: the weights that all share, in fp32, and the outer rule's states.

A merge takes the learners' displacements for a gradient (DiLoCo, Douillard et al., arXiv 2311.08105). The change of the weights
is rounded as it travels and then applied, here and by every learner: so all hold the same bits.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.ask.planner import WaysToPlan
from headrace.engine.beginning import Run, WholeRun, begin_run, resume_run
from headrace.engine.saving import Saver
from headrace.machine.host_memory import huge_page_buffer
from headrace.peers.local_steps.masters import Masters
from headrace.peers.local_steps.number_file import NumberFile
from headrace.terms.closing import Closing
from headrace.terms.cuts import pieces_of
from headrace.terms.events import Sink
from headrace.terms.families import STATES, TRAINED, WEIGHTS
from headrace.terms.options.options import Options
from headrace.update import Chunk, StepScalars, Updater
from headrace.update.sites.travel import Travel


def outer_options(options: Options, rule: str, learning_rate: float) -> Options:
    """Return the options of the node's own state in a run whose learners have `options`: all that they train, in fp32, under
    the outer rule.
    """
    return replace(
        options,
        optimizer=rule,
        learning_rate=learning_rate,
        weight_decay=0.0,
        parameter_groups=(),
        gradient="dense",
        compute_dtype="float32",
        gradient_dtype=None,
        max_grad_norm=None,
        tokens_per_step=None,
        compile_blocks=False,
        liger=False,
        plan=None,
    )


@dataclass(frozen=True, slots=True)
class Merge:
    """The displacements of a merge, in the order in which they are added, and their weights."""

    pushes: Sequence[NumberFile]
    weights: Sequence[float]
    travel: Travel

    def gradient(self, unit: int, count: int) -> torch.Tensor:
        """Return the weighted mean of a unit's displacements, float32."""
        total, found = sum(self.weights), torch.zeros(count, dtype=torch.float32)
        for push, weight in zip(self.pushes, self.weights, strict=True):
            found += self.travel.decode(push.read(unit), count).mul_(weight / total)
        return found


@dataclass(frozen=True, slots=True)
class Change:
    """Where the change of a merge is written as it travels. With error feedback, also where the error before it is read (None:
    there was none), and where the new one is written.
    """

    travelling: NumberFile
    error: NumberFile | None = None
    new_error: NumberFile | None = None


class OuterState(Closing):
    """The shared weights of a run, and the outer rule's states. A context manager. `begin` makes one, `resume` opens it."""

    def __init__(self, run: Run) -> None:
        subject, self._run = run.subject, run
        self.masters = Masters(run.store, subject.maker, subject.seams.wire)
        rules = {True: subject.updater.rule, False: (subject.own_updater or subject.updater).rule}
        self._updaters = {in_place: Updater(rule, subject.cores) for in_place, rule in rules.items()}
        self._saver = Saver(subject, run.store, lambda: self.provenance)
        self.export_notes = subject.export_notes

    @classmethod
    def begin(cls, model: Path, options: Options, sink: Sink, *, final: Path) -> "OuterState":
        """Import the model; `final` is where the finished one will be. Raises as `Engine.open`."""
        return cls(begin_run(model.resolve(), options, sink, WaysToPlan(), whole=WholeRun(final=final)))

    @classmethod
    def resume(cls, run_directory: Path, sink: Sink) -> "OuterState":
        """Open a run at its last merge. Raises as `Engine.resume`."""
        return cls(resume_run(run_directory, sink, WaysToPlan(), verify=True, check=lambda options: None, seams=None))

    @property
    def record(self) -> dict[str, Any]:
        """What the last commit says of the run besides its weights; {} before the first."""
        return dict(self._run.store.record.get("position") or {})

    @property
    def run_id(self) -> str:
        """The run's own name, on all machines."""
        return str(self._run.store.manifest.run_id)

    def commit(self, record: Mapping[str, Any], steps: int | None = None) -> None:
        """Make what was merged durable, with `record` (JSON); `steps` are those of a learner."""
        store = self._run.store
        kept = store.record
        store.commit({**kept, "position": dict(record), "num_steps": kept["num_steps"] if steps is None else steps})

    @torch.no_grad()
    def merge(self, merge: Merge, number: int, change: Change) -> float:
        """Take merge `number` (from 1), write its change, and return the norm of its gradient; `commit` makes it durable."""
        squares = 0.0
        with ExitStack() as files:
            add = files.enter_context(change.travelling.writing())
            keep = files.enter_context(change.new_error.writing()) if change.new_error else lambda error: None
            for unit, count in enumerate(self.masters.counts):
                if not count:
                    add(np.empty(0, merge.travel.dtype))
                    keep(np.empty(0, np.float32))
                    continue
                before, gradient = self.masters.read(unit), merge.gradient(unit, count)
                squares += float(gradient.double().square().sum())
                self._update(unit, gradient, number)
                wanted = self.masters.read(unit).sub_(before)
                if change.error:
                    wanted += torch.from_numpy(change.error.read(unit))
                values = merge.travel.encode(wanted)
                moved = merge.travel.decode(values, count)
                self.masters.write(unit, before.add_(moved))
                add(values)
                keep(wanted.sub_(moved).numpy())
        return float(squares**0.5)

    def _update(self, unit: int, gradient: torch.Tensor, number: int) -> None:
        """Apply the outer rule to a unit in the store, chunk by chunk."""
        store, form, subject = self._run.store, self._run.subject.forms[unit], self._run.subject
        assert form.trained is not None, "what is merged is trained"
        updater = self._updaters[form.in_place]
        flat = torch.zeros(form.trained.num_elements, dtype=torch.float32)
        self.masters.scatter(unit, gradient, flat)
        described, name = store.manifest.units[unit], WEIGHTS if form.in_place else TRAINED
        weights, states = described.family(name), described.family(STATES)
        assert weights is not None, "the unit has weights"
        scalars = StepScalars(learning_rate=subject.optimizer.lr, update=number)
        pieces = pieces_of(form.trained, updater.rule.figures)
        for chunk, (start, stop) in enumerate(weights.chunks):
            content = huge_page_buffer(weights.chunk_bytes(chunk))
            store.read(unit, name, content, chunk).wait()
            kept = huge_page_buffer(states.chunk_bytes(chunk) if states else 0)
            planes: tuple[NDArray[Any], ...] = ()
            if states:
                store.read(unit, STATES, kept, chunk).wait()
                split = updater.rule.planes.split_states(stop - start)
                planes = tuple(kept[place].view(plane.dtype) for plane, place in split)
            numbers = content.view(np.float32)[: stop - start]
            updater.update_range(Chunk(numbers, planes, flat[start:stop].numpy(), unit, start), scalars, pieces)
            store.write(unit, name, chunk, content).wait()
            if states:
                store.write(unit, STATES, chunk, kept).wait()

    # What writes the finished model.

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the weights come from: the run, and the number of a learner's steps."""
        return {"run_id": self.run_id, "steps": self._run.store.record["num_steps"]}

    def save_pretrained(self, out_dir: Path, notes: Mapping[str, str] = MappingProxyType({})) -> None:
        """Write the shared weights as an ordinary directory, as `Engine.save_pretrained` does."""
        self._saver.write(out_dir, notes)

    def remove_state(self) -> None:
        """Close, and delete the state on the SSDs."""
        self._run.store.remove()
        self.close()

    def close(self) -> None:
        """End all threads and close the state. A second call does nothing."""
        for updater in self._updaters.values():
            updater.close()
        self._saver.close()
        self._run.closers.close()
