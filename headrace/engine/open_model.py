"""The one opener: a model directory becomes a chain that runs here, for a run, a generation, an evaluation or a compression.

Invariant: whatever for, its architecture is tried, its parts and its files are compared, and products are computed alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.machine.protocol import Machine
from headrace.model import Chain, Checkpoint, WeightMap, check_whole, self_check
from headrace.terms.layout import PARAMETER_ALIGNMENT
from headrace.terms.optimizer import Optimizer

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
    `check` tries its architecture. `reads_codes`: coded weights are decoded. `leave_out_blocks`: see `Chain.attach`.
    `computes`: whether blocks will run in this process; then `compile_blocks` and `liger` say how.
    """

    compute_dtype: str | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)
    parameter_alignment: int = PARAMETER_ALIGNMENT
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
    config = checkpoint.config
    purpose.check(config)
    check_whole(config, checkpoint.whole)
    dtype = purpose.compute_dtype or checkpoint.main_dtype
    chain = Chain.from_config(config, dtype, purpose.optimizer, purpose.parameter_alignment)
    weights = chain.attach(checkpoint, leave_out_blocks=purpose.leave_out_blocks)
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
