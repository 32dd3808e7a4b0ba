"""The one opener: a model directory becomes a chain that runs here, for a run, a generation, an evaluation or a compression. A
run's last commit becomes weights to read.

Invariant: whatever for, its architecture is tried, its parts and its files are compared, and products are computed alike.
Nothing of training is imported before a run directory is opened.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.flow.weights.completing import read_trained
from headrace.flow.weights.make import Maker
from headrace.machine.protocol import Machine
from headrace.model import Chain, Checkpoint, WeightMap, check_whole, self_check
from headrace.model.blocks.beside import StoredBeside
from headrace.model.directory.importing import check_copies
from headrace.store import StateStore
from headrace.terms.errors import ConfigError, RunDirectoryError
from headrace.terms.events import Sink
from headrace.terms.layout import PARAMETER_ALIGNMENT, UnitLayout
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.options import Options

if TYPE_CHECKING:
    from headrace.engine.seams import Seams

Check = Callable[[Any], None]
"""Tries the architecture of a configuration; raises ModelError where its blocks cannot be run one by one."""


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model as it is stored, as units, and where each of their parameters is stored; and what computes it."""

    checkpoint: Checkpoint
    chain: Chain
    weights: WeightMap
    machine: Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """What a model is opened for.

    `compute_dtype`: None for that of most of its weights. `optimizer` and `parameter_alignment` lay out its units.
    `configured` is given its configuration, and returns the one that is computed by. `check` tries its architecture.
    `reads_codes`: coded weights are decoded. `leave_out_blocks`: see `Chain.attach`.
    `computes`: whether blocks will run in this process; then `compile_blocks` and `liger` say how.
    """

    compute_dtype: str | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)
    parameter_alignment: int = PARAMETER_ALIGNMENT
    configured: Callable[[Any], Any] = lambda config: config
    check: Check = self_check
    reads_codes: bool = True
    leave_out_blocks: bool = False
    computes: bool = True
    compile_blocks: bool = False
    liger: bool = False


def open_model(directory: Path, machine: Machine, purpose: Purpose) -> OpenModel:
    """Return the model in `directory`, whose weights stay where they are, ready to run on `machine`.

    Raises:
        ModelError: it cannot be read, its files do not fit it, or its blocks cannot be run one by one.
        ConfigError: it cannot be run here in the way that is asked for.
    """
    checkpoint = Checkpoint.open(directory, decode=purpose.reads_codes)
    config = purpose.configured(checkpoint.config)
    purpose.check(config)
    check_whole(config, checkpoint.whole)
    dtype = purpose.compute_dtype or checkpoint.main_dtype
    chain = Chain.from_config(config, dtype, purpose.optimizer, purpose.parameter_alignment)
    weights = chain.attach(checkpoint, leave_out_blocks=purpose.leave_out_blocks)
    check_copies(weights)
    if purpose.computes:
        run_on(machine, chain, compile_blocks=purpose.compile_blocks, liger=purpose.liger)
    return OpenModel(checkpoint, chain, weights, machine)


def run_on(machine: Machine, chain: Chain, *, compile_blocks: bool = False, liger: bool = False) -> None:
    """Let `chain` run on `machine`.

    Raises:
        ConfigError: blocks cannot be compiled, or run by Liger's kernels, here.
    """
    chain.move_buffers(machine.device)
    if compile_blocks:
        chain.compile_blocks()
    elif not machine.multiplies(chain.compute_dtype):
        chain.multiply_wide()
    if liger:
        chain.use_liger()


@dataclass(frozen=True, slots=True)
class OpenRun:
    """The last commit of a run; `store` is only read. The owner closes the store.

    `directory` is the model with which the run began. `adapters` reads those of a run of adapters; None for any other run.
    """

    store: StateStore
    directory: Path
    options: Options
    seams: "Seams"
    adapters: Callable[[Chain, WeightMap], StoredBeside] | None

    @property
    def num_steps(self) -> int:
        """Steps that are committed."""
        return int(self.store.record["num_steps"])

    def maker(self, opened: OpenModel) -> Maker:
        """Lay `opened` out as the run's state is; return the maker of its weights, as for a step and an export.

        Raises:
            RunDirectoryError: the directory holds another model than the run began with.
        """
        from headrace.engine.seams import forms_of
        from headrace.update import optimizer_of, rule_of
        from headrace.update.wires.stored_codes import stored_codes

        chain, stored_layouts = opened.chain, self.store.manifest.layouts
        if _parameter_names(chain.layouts) != _parameter_names(stored_layouts):
            raise RunDirectoryError(
                f"{self.directory}: it now holds another model than the run began with; restore that model there"
            )
        chain.lay_out(stored_layouts)
        optimizer = optimizer_of(self.options)
        rule = rule_of(optimizer, chain.compute_dtype).figures
        stored = stored_codes(chain, opened.weights, rule.planes)
        forms = forms_of(chain, self.seams, rule, optimizer, stored)
        codecs = {**self.seams.codecs, **stored.codecs}
        return Maker(forms, self.seams.wire, chain.compute_dtype, codecs, stored.readers)


def open_run(run_directory: Path, compute_dtype: str | None, sink: Sink) -> OpenRun:
    """Return the last commit of a run. What updates is loaded for it: weights may have to be made of what is trained.

    Raises:
        RunDirectoryError: the run is in progress, has no commit, or was begun with seams that no option names.
        ConfigError: the run computes in another dtype than is asked for.
    """
    from headrace.engine.row_files import open_row_files
    from headrace.engine.seams import seams_of
    from headrace.update import optimizer_of, rule_of

    store = StateStore.open(run_directory, sink=sink)
    try:
        identity, options = store.manifest.identity, Options.from_record(store.record.get("options", {}))
        seams, own = seams_of(options, identity.get("wire")), options.compute_dtype
        for name in ("wire", "codec", "site"):
            if (found := identity.get(name)) not in (None, seams.names[name]):
                raise RunDirectoryError(
                    f"{run_directory}: a program began it with a {name} of its own ({found}), which no option names. Have "
                    "that program write the model (`Engine.save_pretrained`), and generate with the result"
                )
        if compute_dtype not in (None, own):
            raise ConfigError(f"compute_dtype: {compute_dtype} was asked for, but the run computes in {own}; leave it out")
        if ranks := identity.get("ranks"):
            who, how = f"{ranks} ranks", "torchrun ... -m headrace resume"
            if not str(ranks).isdecimal():
                who, how = str(ranks), "headrace resume RUN_DIR --stages ..."
            raise RunDirectoryError(
                f"{run_directory}: {who} share out its weights, so that this directory has only a part. Finish it with "
                f"`{how}`, and read `final`"
            )
        wire = seams.wire
        if not wire.has_whole_state:
            raise RunDirectoryError(
                f"{run_directory}: it updates rows of tables one by one, and its units lack them. Export the run "
                "(`headrace export`), and read the result"
            )

        def newest(chain: Chain, weights: WeightMap) -> StoredBeside:
            known = wire.of(chain)
            rule = rule_of(optimizer_of(options), "float32") if known.is_beside else None
            with contextlib.ExitStack() as closers:
                if (rows := open_row_files(known, store, rule)) is not None:
                    closers.callback(rows.close)
                return known.stored(partial(read_trained, store))

        return OpenRun(store, Path(str(identity["model"])), options, seams, newest if wire.is_beside else None)
    except BaseException:
        store.close()
        raise


def _parameter_names(layouts: Sequence[UnitLayout]) -> set[str]:
    return {spec.name for layout in layouts for spec in layout.parameters}
