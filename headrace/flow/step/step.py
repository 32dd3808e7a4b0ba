"""One optimizer step. This is the first page to read.

A step's program (plan/schedules/train.py) lists operations; each names a verb, and each verb is one function of this package:

    flow/weights/   weights come            ssd -> host -> device, or made there from what is stored and trained
    compute.py      the model runs          prologue, blocks and epilogue; backward recomputes each block from its input
    parted.py       experts come singly     up to the router, through a few experts at a time, and on; backward likewise
    waits.py        what is read again      device -> host -> ssd, and back: by what it is, and by the lane
    stash.py        block inputs wait       device -> host -> ssd, and back for backward
    hosted.py       hidden states wait      device -> host between two blocks, and back; their gradients, too
    whole_loss.py   a loss of all rows      log-probabilities first, then gradients: the head is passed twice
    drain.py        gradients go            device -> host; the global norm decides: clip, or skip
    update.py       states come and go      ssd -> the rule in place, on host or device -> ssd, chunk by chunk
    commit.py       the step is durable     one record
    serve.py        workers compute         rows and weights to them, gradients from them: a node's step
    parked.py       stages wait             sums of gradients between two groups of micro-batches; a tied matrix's cross
    shards.py       ranks share out units   what others hold comes here; gradients go to who holds the unit's part

Beside them: `step_batch.py` cuts a batch, and `step_state.py` is what operations share. `steps.py` goes from step to step,
`settle.py` merges between them.

An interpreter (flow/run/execute.py) performs them: overlapped, with one or more threads per lane, or plain, one after the
other. Same bits.
"""

from collections.abc import Callable
from contextlib import nullcontext

from headrace.flow.run.execute import Interpreter, ProgramRun
from headrace.flow.step import commit, compute, drain, parked, parted, serve, shards, update, waits
from headrace.flow.step.step_state import StepState
from headrace.flow.weights.weights import WEIGHT_VERBS
from headrace.terms.events import NO_STEP
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Program, Verb

HANDLERS: dict[Verb, Callable[[StepState, Op], None]] = {
    Verb.PROLOGUE: compute.prologue,
    Verb.FORWARD: compute.forward,
    Verb.ENTER: parted.enter,
    Verb.ROUTE: parted.route,
    Verb.VISIT: parted.visit,
    Verb.REVISIT: parted.revisit,
    Verb.RECOMPUTE: parted.recompute,
    Verb.OUT: waits.out,
    Verb.IN: waits.back,
    Verb.EPILOGUE: compute.epilogue,
    Verb.LOG_PROBS: compute.log_probs,
    Verb.SCORE: compute.score,
    Verb.BACKWARD: compute.backward,
    Verb.PROLOGUE_BACKWARD: compute.prologue_backward,
    Verb.DRAIN: drain.drain,
    Verb.PUSH: drain.push,
    Verb.DECIDE: drain.decide,
    Verb.READ_STATES: update.read_states,
    Verb.STATES_TO_DEVICE: update.states_to_device,
    Verb.UPDATE: update.update,
    Verb.STATES_TO_HOST: update.states_to_host,
    Verb.WRITE_STATES: update.write_states,
    Verb.WRITE_WEIGHTS: update.write_weights,
    Verb.COMMIT: commit.commit,
    Verb.GATHER: shards.gather,
    Verb.SCATTER: shards.scatter,
    Verb.GIVE: parked.send_tied_gradient,
    Verb.TAKE: parked.receive_tied_gradient,
    Verb.ANNOUNCE: serve.announce,
    Verb.SEND: serve.send,
    Verb.RECEIVE: serve.receive,
    Verb.REPORT: serve.report,
}


def run_step(program: Program, state: StepState, interpreter: Interpreter) -> ProgramRun:
    """Run one step's program. On return the loss and the norm are known; updates and commit may still be under way."""

    def perform(op: Op) -> None:
        with state.parts.chain.arithmetic() if op.lane is Lane.COMPUTE else nullcontext():
            if op.part >= 0 and op.verb in parted.OF_ROUNDS:
                parted.OF_ROUNDS[op.verb](state, op)
            elif (bring := WEIGHT_VERBS.get(op.verb)) is not None:
                bring(state.parts, op)
            else:
                HANDLERS[op.verb](state, op)

    try:
        return interpreter.run(program, perform, state.verdict.step if state.learns else NO_STEP)
    finally:
        state.at_experts.close()
        if state.parts.parted.experts is not None:
            state.parts.parted.experts.end_pass(idle=False)
