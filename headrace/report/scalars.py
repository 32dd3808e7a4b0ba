"""The scalars of a step or an evaluation, under the names that people search for: `train/loss`, `eval/loss`, ..."""

from headrace.terms.events import Evaluated, Event, StepResult


def scalars_of(event: Event) -> tuple[int, dict[str, float]] | None:
    """Return step and scalars of the end of a step or of an evaluation; None for other events."""
    if isinstance(event, Evaluated):
        return event.step, {"eval/loss": event.loss, "eval/seconds": event.seconds}
    if not isinstance(event, StepResult):
        return None
    scalars = {
        "train/loss": event.loss,
        "train/grad_norm": event.grad_norm,
        "train/learning_rate": event.learning_rate,
        "train/tokens_per_second": event.tokens_per_second,
        "train/skipped": float(event.skipped is not None),
        **{f"bytes_read/{tier}": size for tier, size in event.bytes_read.items()},
        **{f"bytes_written/{tier}": size for tier, size in event.bytes_written.items()},
        **{f"peak_bytes/{tier}": size for tier, size in event.peak_bytes.items()},
    }
    return event.step, {name: float(value) for name, value in scalars.items() if value is not None}
