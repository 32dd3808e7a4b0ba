"""From step to step: the program of each, what it leaves to the next, and how a step is undone.

`step.py` is one step; this is the sequence of them. Batches, schedules and records are not here (the engine has them).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.flow.run.execute import Interpreter
from headrace.flow.step.step import run_step
from headrace.flow.step.step_batch import StepBatch
from headrace.flow.step.step_state import Parts, StepState, Verdict
from headrace.flow.weights.weights import load_residents
from headrace.plan.forecast.footprint import MOST_PROGRAMS
from headrace.plan.schedules.forward import build_forward
from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.train import build_program, build_tail, redo
from headrace.plan.value.plan import Plan
from headrace.terms.events import Notice
from headrace.terms.families import STATES
from headrace.terms.program import Program
from headrace.update import HitRate


class _Build(Protocol):
    def __call__(self, plan: Plan, num_micro_batches: int, before: Snapshot, *, durable: bool) -> tuple[Program, Snapshot]: ...


@dataclass(frozen=True, slots=True)
class ProgramBuilders:
    """How the program of a step is built, and the program that finishes what a step left pending."""

    program: _Build = build_program
    tail: Callable[[Plan, Snapshot], tuple[Program, Snapshot]] = build_tail
    scoring: Callable[[Plan, int, Snapshot], tuple[Program, Snapshot]] = build_forward


_TRAINING = ProgramBuilders()
# If fewer of the last steps than this share needed no clipping, a step that can be run again is not begun on that guess.
_GUESSING_PAYS = 0.25


class Steps:
    """Runs steps one after the other on one set of buffers. Close it before the buffers are freed.

    `schedule` says what a step has to do. `hits` counts how often updates could have started before the norm was known; it
    decides the policy where the plan has two.
    """

    def __init__(self, parts: Parts, interpreter: Interpreter, hits: HitRate, schedule: ProgramBuilders = _TRAINING) -> None:
        self.parts, self.hits, self._schedule = parts, hits, schedule
        self._interpreter = interpreter
        self._programs: dict[tuple[int, Snapshot, bool], tuple[Program, Snapshot]] = {}
        self._pending: Verdict | None = None
        self._last: Verdict | None = None
        self._told = False
        self._left = self._load_residents()

    def heed(self, on_failure: Callable[[BaseException], None]) -> None:
        """Call `on_failure` when a lane fails, in its thread: it may wake those whom the interpreter cannot."""
        self._interpreter.on_failure = on_failure

    @property
    def failed(self) -> bool:
        """Whether a lane failed, so that nothing can be finished any more."""
        return self._interpreter.failure is not None

    def run(self, num_micro_batches: int, verdict: Verdict, state_of: Callable[[Verdict | None], StepState]) -> StepState:
        """Run one step. `state_of` gets the verdict of the step before, if updates of that step are still to be done.

        Raises:
            StepFailed: a lane failed; the last committed step is untouched.
        """
        assert num_micro_batches <= self.parts.plan.batch.num_micro_batches, "there are no buffers for more than were planned"
        with self._whole_or_failed():
            return self._run(num_micro_batches, verdict, state_of)

    def _run(self, num_micro_batches: int, verdict: Verdict, state_of: Callable[[Verdict | None], StepState]) -> StepState:
        state = state_of(self._pending)
        may_rerun = self.parts.plan.updates.policy == "rerun"
        # If hardly any step needs no clipping, a first run only finds the norm: nothing is updated or written in vain.
        verdict.missed = may_rerun and bool(self.hits.outcomes) and not self.hits.exceeds(_GUESSING_PAYS)
        self._perform(state, num_micro_batches, durable=self._pending is None or self._pending.durable)
        self._tell(state.left.not_kept)
        self._last = verdict
        self.hits = self.hits.after(verdict.is_hit)
        if verdict.missed and verdict.skipped is None and may_rerun:
            return self._run_again(num_micro_batches, verdict, state_of)
        if verdict.void and self.parts.plan.updates.policy != "deferred":
            self._take_back(verdict)
        else:
            self._pending = verdict if self.parts.plan.updates.late_units else None
        return state

    def _perform(self, state: StepState, num_micro_batches: int, *, durable: bool) -> None:
        """Run the operations of one step; on return its verdict is known."""
        run_step(self._next_program(num_micro_batches, durable=durable), state, self._interpreter)

    def _next_program(self, num_micro_batches: int, *, durable: bool) -> Program:
        key = (num_micro_batches, self._left, durable)
        if key not in self._programs:
            if len(self._programs) == MOST_PROGRAMS:
                # The oldest goes: the steady state needs one program, or three where some steps are no checkpoints.
                del self._programs[next(iter(self._programs))]
            self._programs[key] = self._schedule.program(self.parts.plan, num_micro_batches, self._left, durable=durable)
        program, self._left = self._programs[key]
        return program

    def score(self, batch: StepBatch, verdict: Verdict, first_micro: int = 0) -> StepState:
        """Run rows of a batch forward through the newest weights, without changing anything.

        Raises:
            StepFailed: a lane failed; the last committed step is untouched.
        """
        with self._whole_or_failed():
            self._flush()
            return self._score(batch, verdict, first_micro)

    def score_afresh(self, batch: StepBatch, verdict: Verdict) -> StepState:
        """As `score`, but nothing is flushed, and all weights are fetched, for this pass and for what follows: so whoever
        sends them knows which.

        Raises:
            StepFailed: a lane failed.
        """
        with self._whole_or_failed():
            self._interpreter.wait()
            self._left = Snapshot()
            state = self._score(batch, verdict)
            self._left = Snapshot()
            return state

    def _score(self, batch: StepBatch, verdict: Verdict, first_micro: int = 0) -> StepState:
        state = StepState(self.parts, batch, verdict, None, first_micro=first_micro, learns=False)
        program, self._left = self._schedule.scoring(self.parts.plan, len(batch.micro_batches), self._left)
        with self.parts.chain.evaluating():
            run_step(program, state, self._interpreter)
            self._interpreter.wait()
        return state

    def follow_hit_rate(self) -> Plan:
        """Change between waiting for the norm and guessing, if the plan has both policies: they share all buffers."""
        plan, hits = self.parts.plan, self.hits
        if plan.results.speculation is None or not hits.is_due:
            return plan
        speculate = hits.exceeds(plan.results.speculation.break_even)
        if speculate != (plan.updates.policy == "speculative"):
            self.flush()
            plan = plan.with_updates(
                policy="speculative" if speculate else "deferred",
                late_units=plan.results.speculation.late_units if speculate else plan.updated_units,
            )
            self.parts = replace(self.parts, plan=plan)
            self._programs.clear()
        return plan

    def flush(self) -> None:
        """Finish everything under way and make the newest step durable."""
        with self._whole_or_failed():
            self._flush()

    def _flush(self) -> None:
        if self._pending is not None:
            self._pending.durable = True
            program, self._left = self._schedule.tail(self.parts.plan, self._left)
            run_step(program, StepState(self.parts, StepBatch(), self._pending, self._pending), self._interpreter)
            self._pending = None
        self._interpreter.wait()
        if self._last is not None and int(self.parts.store.record["num_steps"]) <= self._last.step:
            self.parts.commit(self._last)

    def close(self) -> None:
        """End the interpreter's threads, without flushing."""
        self._interpreter.close()

    @contextmanager
    def _whole_or_failed(self) -> Iterator[None]:
        """Refuse to continue after work that stopped in the middle, also after Ctrl-C. What these steps know about the buffers
        would be wrong, and a commit would make it durable. The last committed step is untouched.
        """
        try:
            yield
        except BaseException as failure:
            self._interpreter.fail(failure)
            raise

    def _take_back(self, verdict: Verdict) -> None:
        """Return to the committed slots; then record a skipped step, or repeat the updates from the held gradients."""
        self._go_back()
        if verdict.skipped is not None:
            self.parts.commit(verdict)
            return
        verdict.missed, verdict.redone = False, True
        self._left, self._pending = redo(self.parts.plan), verdict
        self._flush()

    def _run_again(
        self, num_micro_batches: int, verdict: Verdict, state_of: Callable[[Verdict | None], StepState]
    ) -> StepState:
        """Return to the committed slots and run the step again from its batch, with the factor that is now known."""
        self._go_back()
        verdict.missed, verdict.redone = False, True
        state = state_of(None)
        self._perform(state, num_micro_batches, durable=True)
        return state

    def _go_back(self) -> None:
        self._interpreter.wait()
        self.parts.store.abandon()
        self._left, self._pending = self._load_residents(), None

    def _tell(self, not_kept: set[int]) -> None:
        """Say once that blocks are recomputed whole although the plan keeps outputs of theirs: exact, but slower."""
        if not_kept and not self._told:
            self._told = True
            blocks = f"{len(not_kept)} of {self.parts.plan.num_blocks} blocks"
            words = f"replay: {blocks} run other operators than planned, or keep more; they are recomputed, which takes longer"
            self.parts.sink(Notice(text=words))

    def _load_residents(self) -> Snapshot:
        """Read what lives in memory from the store's newest version: at the start, and after a step was taken back."""
        parts, plan = self.parts, self.parts.plan
        load_residents(parts, parts.peers.gather) if parts.peers is not None else load_residents(parts)
        for unit in plan.updates.resident_states:
            states = parts.buffers.resident_states[unit]
            for chunk in range(plan.num_chunks(unit)):
                parts.store.read(unit, STATES, states[plan.states_of_chunk(unit, chunk)], chunk).wait()
        return Snapshot()
