"""The real engine for the loop. It is imported late, because it imports the model library and the kernels' compiler.

Invariant: only this module, on the loop's side, knows the names of the engine's own files.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from headrace.engine.beginning import WholeRun
from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine
from headrace.machine.protocol import Machine
from headrace.model import Chain, Checkpoint
from headrace.plan.value.plan import Plan
from headrace.runs.protocols import Engines, StateKind
from headrace.store import RunLock, read_manifest, remove_uncommitted, remove_unmade
from headrace.store.manifest import MANIFEST_NAME, RECORD_NAMES
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import RunDirectoryError
from headrace.terms.events import Sink
from headrace.terms.layout import UnitLayout
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.options import Options
from headrace.terms.packed_rows import PackedRows


def headrace_engines() -> Engines:
    """Return the engines of this package."""
    return engines_of(Engine)


def engines_of(kind: type[Engine], seams: Seams | None = None, *, verify: bool = True) -> Engines:
    """Return the engines of a `kind`, which open runs with `seams`. `verify`: a resumed run's state is checked first."""
    opened = partial(opened_engine, kind=kind, seams=seams)
    return Engines(opened, partial(resumed_engine, kind=kind, seams=seams, verify=verify), why_not_packed, state_of, discard)


def opened_engine(
    model: Path,
    options: Options,
    sink: Sink | None = None,
    *,
    measure: Callable[[Plan, Machine], Ceilings | None] | None = None,
    packed: PackedRows | None = None,
    kind: type[Engine] = Engine,
    seams: Seams | None = None,
) -> Engine:
    """Return `Engine.open` for a run whose model will lie in its directory, so that space for that is checked, too."""
    final = RunDirectory(Path(str(options.output))).final
    return kind.open(model, options, sink, measure=measure, whole=WholeRun(final=final, packed=packed), seams=seams)


def resumed_engine(
    run_directory: Path,
    *,
    sink: Sink | None = None,
    to_train: bool = True,
    kind: type[Engine] = Engine,
    seams: Seams | None = None,
    verify: bool = True,
) -> Engine:
    """Return `Engine.resume`, after checking that the model directory is still the one with which the run began.

    The weights come from the state, but the model directory gives the architecture, and the tensors' names for the export. If
    the run is opened `to_train`, `config.yaml` may not differ either from what the run began with, because changes would be
    ignored silently.

    Raises:
        RunDirectoryError, CorruptData: see `Engine.resume`; or the model or an option has changed.
        ModelError: the model directory is gone or damaged.
    """
    manifest, config = read_manifest(run_directory), RunDirectory(run_directory).read_config()
    begun_with = Path(str(manifest.identity["model"]))
    if config.model.resolve() != begun_with:
        raise RunDirectoryError(
            f"{run_directory}: config.yaml names the model {config.model}, the run began with {begun_with}; name that one "
            "again, or start a new run"
        )
    chain = Chain.from_config(Checkpoint.open(begun_with, decode=True).config, config.compute_dtype, Optimizer())
    found, expected = _shapes(chain.layouts), _shapes(manifest.layouts)
    if found != expected:
        name = min(found.keys() ^ expected.keys() or {name for name in found if found[name] != expected[name]})
        raise RunDirectoryError(
            f"{run_directory}: {begun_with} now holds another model than the run began with. {name} was "
            f"{expected.get(name, 'not there')}, is {found.get(name, 'not there')}; restore the model of the run there"
        )

    def check(begun: Options) -> None:
        for name in Options.fixed_keys():
            now, then = getattr(config, name), getattr(begun, name)
            if to_train and now != then:
                raise RunDirectoryError(
                    f"{run_directory}: config.yaml has {name} {now}, the run began with {then} and keeps that; restore it. "
                    "To train differently, start a run from its model (`headrace export`, or `final`)"
                )

    return kind.resume(run_directory, sink=sink, check=check, seams=seams, verify=verify)


def _shapes(layouts: Sequence[UnitLayout]) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for layout in layouts for parameter in layout.parameters}


def why_not_packed(model: Path, sequence_length: int) -> str:
    """Return why an architecture does not keep samples of one row of `sequence_length` tokens apart by their positions alone;
    "" if it does.

    Raises:
        ModelError: the architecture is not supported, or its files are damaged.
    """
    chain = Chain.from_config(Checkpoint.open(model, decode=True).config, "float32", Optimizer())
    return "" if chain.packs(sequence_length) else chain.packing_reason


def state_of(run_directory: Path) -> StateKind:
    """Return what the run directory holds for `Engine.resume`."""
    if not (run_directory / MANIFEST_NAME).exists():
        return StateKind.NONE
    # Record files have their full size from the beginning, but are empty before the first commit.
    records = [run_directory / name for name in RECORD_NAMES]
    committed = any(record.exists() and any(record.read_bytes()) for record in records)
    return StateKind.COMMITTED if committed else StateKind.BEGUN


def discard(run_directory: Path) -> None:
    """Remove the engine's files of a run that was never committed, from its SSD directories and from `run_directory`. The rest
    of an interrupted creation or removal is removed, too. What another process has committed meanwhile stays: whoever begins a
    run there is told.

    Raises:
        RunDirectoryError: a living process holds the run, perhaps in the middle of its import. Or it is unknown whether the run
            was moved or copied, in which case its state may have been trained since.
        ConfigError: a process has taken up the run just now.
        StorageError: something cannot be removed.
    """
    if not (run_directory / MANIFEST_NAME).exists():
        remove_unmade(run_directory)
        return
    lock = RunLock(run_directory)
    try:
        if state_of(run_directory) is StateKind.BEGUN:
            remove_uncommitted(run_directory)
    finally:
        lock.release()
