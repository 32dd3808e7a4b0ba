"""Whether a state is that of this model: its units have the same parameters, of the same kinds."""

from collections.abc import Sequence
from pathlib import Path

from headrace.terms.errors import RunDirectoryError
from headrace.terms.layout import FROZEN, SCALE, UnitLayout

# Kinds of parameters, in words.
_KINDS = {"": "an ordinary weight", SCALE: "a norm", FROZEN: "a frozen one"}


def refuse_other_layouts(model: Path, begun: Sequence[UnitLayout], layouts: Sequence[UnitLayout]) -> None:
    """Refuse to go on with the state of a run that was `begun` with other units than the `layouts` of `model`.

    Raises:
        RunDirectoryError: their parameters differ.
    """
    if tuple(begun) != tuple(layouts):
        _refuse_other_kinds(begun, layouts)
        raise RunDirectoryError(
            f"{model}: its parameters are not those of this run's state ({len(begun)} units in "
            f"the run, {len(layouts)} in the model). Restore the model that the run was started with"
        )


def _refuse_other_kinds(begun: Sequence[UnitLayout], layouts: Sequence[UnitLayout]) -> None:
    """Raise `RunDirectoryError` if a run has the parameters that it began with, but would train one of them otherwise."""
    then, now = (
        {spec.name: (spec.shape, spec.kind) for unit in units for spec in unit.parameters} for units in (begun, layouts)
    )
    for name, (shape, kind) in then.items():
        found = now.get(name, (shape, kind))
        if found[0] == shape and found[1] != kind:
            raise RunDirectoryError(
                f"this run began under a version that took {name} for {_KINDS[kind]}. This one takes it for "
                f"{_KINDS[found[1]]} and would train it otherwise: resume with that version, or start a new run"
            )
