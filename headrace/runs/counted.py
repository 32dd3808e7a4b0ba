"""Events of the engine as people read them: steps are counted from 1."""

from collections.abc import Callable
from dataclasses import replace

from headrace.plan.value.plan import Plan
from headrace.terms.events import NO_STEP, Committed, Event, OpDone, Planned, Sink, StepResult


def for_people(reporters: Sink, tell: Callable[[Plan], None] = lambda plan: None) -> Sink:
    """Return the engine's sink. A step's result comes from whoever asked for it, and knows it first; a plan goes to `tell`."""

    def emit(event: Event) -> None:
        if isinstance(event, Planned):
            tell(event.plan)
        elif isinstance(event, OpDone) and event.step == NO_STEP:
            return  # of an evaluation, whose time belongs to no step
        elif isinstance(event, OpDone | Committed):
            reporters(replace(event, step=event.step + 1))
        elif not isinstance(event, StepResult):
            reporters(event)

    return emit
