"""What waits until it is read again goes down a tier, device -> host -> ssd, and comes back: `Verb.OUT` and `Verb.IN`.

The lane says which tier: that of a link is host memory, that of a drive is the SSD, where all go and come in one way.
"""

from headrace.flow.step import drain, hosted, parked, stash
from headrace.flow.step.step_state import StepState
from headrace.terms.lanes import Lane
from headrace.terms.program import Op, Waiting

# Where it lies on the SSD, and its bytes in host memory.
_PAGES = {Waiting.INPUT: stash.input_pages, Waiting.GRADIENT: drain.gradient_pages, Waiting.SUM: parked.sum_pages}
_TO_HOST = {
    Waiting.INPUT: stash.input_to_host,
    Waiting.HIDDEN: hosted.hidden_to_host,
    Waiting.HIDDEN_GRADIENT: hosted.hidden_to_host,
    Waiting.SUM: parked.sum_to_host,
}
_TO_DEVICE = {
    Waiting.INPUT: stash.input_to_device,
    Waiting.HIDDEN: hosted.hidden_to_device,
    Waiting.HIDDEN_GRADIENT: hosted.hidden_to_device,
    Waiting.SUM: parked.sum_to_device,
}


def out(state: StepState, op: Op) -> None:
    """Take it a tier down: from the device to host memory, or from there to the SSD."""
    assert op.waiting is not None, "says what it moves"
    if op.lane is Lane.SSD_WRITE:
        state.parts.store.scratch_write(*_PAGES[op.waiting](state, op)).wait()
    else:
        _TO_HOST[op.waiting](state, op)


def back(state: StepState, op: Op) -> None:
    """Bring it a tier up again."""
    assert op.waiting is not None, "says what it moves"
    if op.lane is not Lane.SSD_READ:
        _TO_DEVICE[op.waiting](state, op)
        return
    state.parts.store.scratch_read(*_PAGES[op.waiting](state, op)).wait()
    if op.waiting is Waiting.INPUT:
        stash.read_in_place(state, op)
