"""A stage's steps (AxoNN): groups of micro-batches go through its blocks as they arrive, backward before forward.

Hidden states come from the stage before and go to the next one; their gradients return. Invariant: arrival decides when a group
runs, and never how sums are grouped: those of one process.
"""

from collections.abc import Callable, Sequence

import torch

from headrace.flow.step.step import run_step
from headrace.flow.step.step_batch import StepBatch
from headrace.flow.step.step_state import StepState, Verdict
from headrace.flow.step.steps import Steps
from headrace.peers.stages.line import Line
from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.schedules.stage import (
    StageGroup,
    StagePart,
    build_back,
    build_closing,
    build_onward,
    build_opening,
    build_stage_pass,
    build_verdict,
    stage_groups_of,
)
from headrace.plan.value.plan import Plan
from headrace.plan.value.stage_place import StageChoices
from headrace.terms.forms import AWAY
from headrace.terms.lanes import Lane
from headrace.terms.program import Program


class StagedSteps(Steps):
    """Runs the steps of one stage; see `Steps`."""

    _is_fresh = True

    def _load_residents(self) -> Snapshot:
        self._is_fresh, parts = True, self.parts
        if parts.plan.units[0].home == AWAY:  # a prologue without weights still tells what blocks are called with
            nothing = torch.zeros(1, dtype=parts.buffers.dtype, device=parts.machine.device)
            parts.buffers.residents[0] = nothing.expand(parts.chain.layouts[0].num_elements)
        return super()._load_residents()

    def _perform(self, state: StepState, num_micro_batches: int, *, durable: bool) -> None:
        line, groups = self._begin_line(state, back=True)
        part, commits = self._part(num_micro_batches, durable=durable), state.pending is not None
        self._run_built(state, lambda left: build_opening(self.parts.plan, part, left))
        self._share_table(state)
        onward = back = 0
        in_flight = _stage_of(self.parts.plan).in_flight
        if not part.is_first:
            self._drop_embedded(state)
        while back < len(groups):
            may_go = onward < len(groups) and onward - back < in_flight
            kind = line.next_kind(onward=may_go, back=not part.is_last and back < onward)
            if kind == "onward":
                last = self._onward(state, part, groups[onward], commits=commits and onward == 0)
                onward += 1
            else:
                last = self._back(state, part, groups[back])
            back = onward if part.is_last else back + (kind == "back")
        self._run_built(state, lambda left: build_verdict(self.parts.plan, part, left, last))

    def _onward(self, state: StepState, part: StagePart, group: StageGroup, *, commits: bool) -> Program:
        line, plan = self.parts.line, self.parts.plan
        if not part.is_first:
            self._put(state, part, group, line.take("onward"))
        program = self._run_built(state, lambda left: build_onward(plan, part, left, group, commits=commits))
        if not part.is_last:
            line.give("onward", [state.inputs.pop((part.blocks.stop, micro)) for micro in group.micros])
        elif not part.is_first:
            self._return(state, group)
        return program

    def _back(self, state: StepState, part: StagePart, group: StageGroup) -> Program:
        line = self.parts.line
        state.hidden_gradients.update(zip(group.micros, self._brought(line.take("back")), strict=True))
        if any(tier not in ("device", AWAY) for tier in self.parts.plan.stash.tiers):
            self._interpreter.wait()  # inputs that a program before this one put away must be there
        program = self._run_built(state, lambda left: build_back(self.parts.plan, part, left, group))
        if not part.is_first:
            self._return(state, group)
        return program

    def _return(self, state: StepState, group: StageGroup) -> None:
        """Send the gradients of a group's hidden states to the stage before."""
        self.parts.line.give("back", [state.hidden_gradients.pop(micro) for micro in group.micros])
        for micro in group.micros:
            del state.calls[micro]

    def _score(self, batch: StepBatch, verdict: Verdict, first_micro: int = 0) -> StepState:
        state = StepState(self.parts, batch, verdict, None, first_micro=first_micro, learns=False)
        with self.parts.chain.evaluating():
            line, groups = self._begin_line(state, back=False)
            part = self._part(len(batch.micro_batches), durable=True)
            self._run_built(state, lambda left: build_opening(self.parts.plan, part, left))
            self._share_table(state)
            if not part.is_first:
                self._drop_embedded(state)
            for group in groups:
                if not part.is_first:
                    line.next_kind(onward=True, back=False)
                    self._put(state, part, group, line.take("onward"))
            self._run_built(state, lambda left: build_stage_pass(self.parts.plan, part, left))
            for group in groups if not part.is_last else ():
                line.give("onward", [state.inputs.pop((part.blocks.stop, micro)) for micro in group.micros])
            self._interpreter.wait()
        return state

    def _begin_line(self, state: StepState, *, back: bool) -> tuple[Line, list[StageGroup]]:
        line: Line = self.parts.line
        found = _stage_of(self.parts.plan).groups_of(len(state.batch.micro_batches))
        width, batches = self.parts.chain.hidden_size, state.batch.micro_batches
        shapes = [[(*batches[micro].input_ids.shape, width) for micro in micros] for micros in found]
        line.begin_step(shapes, self.parts.buffers.dtype, back=back)
        return line, stage_groups_of(found)

    def _part(self, num_micro: int, *, durable: bool) -> StagePart:
        line, num_blocks = self.parts.line, self.parts.plan.num_blocks
        return StagePart(
            blocks=line.blocks(num_blocks),
            num_micro=num_micro,
            durable=durable,
            is_first=line.rank == 0,
            is_last=line.rank == line.size - 1,
        )

    def _run_built(self, state: StepState, build: Callable[[Snapshot], tuple[Program, Snapshot]]) -> Program:
        program, self._left = build(self._left)
        run_step(program, state, self._interpreter)
        return program

    def _put(self, state: StepState, part: StagePart, group: StageGroup, came: Sequence[torch.Tensor]) -> None:
        brought = zip(group.micros, self._brought(came), strict=True)
        state.inputs.update({(part.blocks.start, micro): hidden for micro, hidden in brought})

    def _brought(self, came: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what came over the link where compute reads it."""
        machine = self.parts.machine
        brought = [each.to(machine.device) for each in came]
        for each in brought:
            machine.lend(each, Lane.COMPUTE)
        return brought

    def _drop_embedded(self, state: StepState) -> None:
        """Forget what the prologue made of weights that are not here: only what it calls blocks with counts."""
        for micro in range(len(state.batch.micro_batches)):
            state.inputs.pop((1, micro))

    def _share_table(self, state: StepState) -> None:
        """Bring a tied matrix to the last stage: once, and again after each update by the first one."""
        plan, line = self.parts.plan, self.parts.line
        if not plan.tied or line.rank not in (0, line.size - 1) or not (self._is_fresh or 0 in plan.trained_units):
            return
        self._is_fresh = False
        self._interpreter.wait()
        table = self.parts.buffers.residents[0]
        line.send_table(table) if line.rank == 0 else line.receive_table(table)

    @staticmethod
    def finish(plan: Plan, before: Snapshot, *, line: Line) -> tuple[Program, Snapshot]:
        """Return the program that finishes what a step left pending (`ProgramBuilders.tail`)."""
        part = StagePart(
            blocks=line.blocks(plan.num_blocks), num_micro=0, is_first=line.rank == 0, is_last=line.rank == line.size - 1
        )
        return build_closing(plan, part, before)


def _stage_of(plan: Plan) -> StageChoices:
    assert plan.stage is not None, "stages have plans of their own"
    return plan.stage
