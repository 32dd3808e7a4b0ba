"""The units of a generation: plain ones, those of a directory with coded weights, or those that compression would write.

Invariant: of coded directories they are what a run reads, by the same code (`generate/passes/sources.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.ask.model_config import refuse_other_dtypes
from headrace.codec.table import Code, code_to_write
from headrace.codec.units import coded_shapes
from headrace.flow.weights.expert_source import expert_figures
from headrace.generate.passes.sources import GenerationSource, ShardSource
from headrace.model import Chain, Checkpoint
from headrace.model.parts.banks import find_experts
from headrace.model.seats.bank_check import why_no_banks
from headrace.model.streams.stored_experts import experts_as_computed
from headrace.plan.value.expert_plan import ExpertFigures
from headrace.terms.coding import as_matrix
from headrace.terms.events import Event
from headrace.terms.forms import UnitFigures, home_of
from headrace.terms.layout import ParameterSpec, UnitLayout
from headrace.terms.sizes import PAGE_BYTES, round_up


@dataclass(frozen=True, slots=True)
class GenerationUnits:
    """Units as passes read them, experts that may come by themselves, and what there is to say of them.

    `in_codes` are the same where matrices stay in their codes; without units if only experts can.
    """

    figures: tuple[UnitFigures, ...]
    experts: ExpertFigures | None = None
    notes: tuple[str, ...] = ()
    in_codes: "GenerationUnits | None" = None

    @classmethod
    def of(cls, source: GenerationSource, notes: tuple[str, ...]) -> "GenerationUnits":
        """Return the units of a source."""
        coded = None
        if (found := source.in_codes) is not None:
            coded = cls(found.blocks.figures if found.blocks else (), found.experts.expert_figures if found.experts else None)
        return cls(tuple(source.figures), source.by_experts.expert_figures if source.by_experts else None, notes, coded)


def plain_and_coded(
    chain: Chain, checkpoint: Checkpoint | None, compress: str | None, *, on_cpu: bool
) -> tuple[GenerationUnits, GenerationUnits | None]:
    """Return the units of plain weights, and those of the code in `checkpoint` or of the one that `compress` names.

    Raises:
        ModelError, ConfigError: as `units_of_files` and `units_if_compressed` say.
    """
    plain = GenerationUnits(_frozen(chain.layouts, chain.num_blocks), _experts_of(chain))
    if compress is not None:
        return plain, units_if_compressed(chain, compress, plain.figures, plain.experts, on_cpu=on_cpu)
    return plain, None if checkpoint is None else units_of_files(chain, checkpoint, on_cpu=on_cpu)


def units_of_files(chain: Chain, checkpoint: Checkpoint, *, on_cpu: bool) -> GenerationUnits:
    """Return units, experts and notes of a coded model as its files have them: their headers are read, no weights.

    Raises:
        ModelError: they belong to another model.
    """
    source = ShardSource(chain, chain.attach(checkpoint), _silent, on_cpu=on_cpu)
    try:
        chain.lay_out(source.layouts)
        return GenerationUnits.of(source, source.notes)
    finally:
        source.close()


def units_if_compressed(
    chain: Chain, name: str, units: Sequence[UnitFigures], experts: ExpertFigures | None, *, on_cpu: bool
) -> GenerationUnits:
    """Return the units of a model, and its experts, as `headrace compress --to NAME` would make them of these.

    Raises:
        ConfigError: no such code.
    """
    code = code_to_write("compress", name)
    refuse_other_dtypes(code, chain.config)
    shapes = [
        coded_shapes(layout.parameters, code) if code.lossless or _is_block(chain, unit) else []
        for unit, layout in enumerate(chain.layouts)
    ]
    made = tuple(map(_Coded(chain, code, on_cpu).of, units, shapes, chain.layouts))
    if experts is None:
        return GenerationUnits(made)
    stacks = [[spec for spec in found if len(spec.shape) == 3] for found in shapes]
    rest = [[spec for spec in found if len(spec.shape) != 3] for found in shapes]
    commons = tuple(map(_Coded(chain, code, on_cpu).of, experts.units, rest, chain.layouts))
    largest = max(stacks, key=lambda found: sum(spec.num_elements // spec.shape[0] for spec in found))
    each = [(spec.shape[1], spec.shape[2]) for spec in largest]
    apart = replace(
        experts,
        units=commons,
        stored_bytes=round_up(round(sum(code.matrix_bytes(*shape) for shape in each)), PAGE_BYTES),
        is_made=True,
        making_bytes=max(_Coded(chain, code, on_cpu).making_bytes(*shape) for shape in each),
        decodes=((code.kind, sum(rows * columns for rows, columns in each)),),
    )
    return GenerationUnits(made, apart)


def _is_block(chain: Chain, unit: int) -> bool:
    return 1 <= unit <= chain.num_blocks


class _Coded:
    """Makes coded figures of plain ones."""

    def __init__(self, chain: Chain, code: Code, on_cpu: bool) -> None:
        self._chain, self._code, self._on_cpu = chain, code, on_cpu

    def of(self, figures: UnitFigures, coded: Sequence[ParameterSpec], layout: UnitLayout) -> UnitFigures:
        """Return the figures of a unit of which these parameters are coded."""
        if not coded:
            return figures
        weights = sum(spec.num_elements for spec in coded)
        shapes = [as_matrix(spec.shape) for spec in coded]
        plain = (figures.num_elements - weights) * self._chain.dtype.itemsize
        return replace(
            figures,
            stored_bytes=round_up(round(plain + sum(self._code.matrix_bytes(*shape) for shape in shapes)), PAGE_BYTES),
            making_bytes=max(self.making_bytes(*(spec.shape[-2:])) for spec in coded),
            decodes=((self._code.kind, weights),),
        )

    def making_bytes(self, rows: int, columns: int) -> int:
        """Return what decoding a matrix allocates for a moment."""
        return self._code.codec().decoding_bytes(rows, columns, on_host=self._on_cpu)


def _silent(event: Event) -> None:
    """Sink of what reads nothing but headers."""


def _frozen(layouts: Sequence[UnitLayout], num_blocks: int) -> tuple[UnitFigures, ...]:
    """Return the figures of units that are only read."""
    return tuple(
        UnitFigures(
            name=layout.name,
            num_elements=layout.num_elements,
            num_parameters=layout.num_parameters,
            home=home_of(index, num_blocks),
            trained_elements=0,
        )
        for index, layout in enumerate(layouts)
    )


def _experts_of(chain: Chain) -> ExpertFigures | None:
    """Return the figures of a model's experts, if each lies in the files as it is computed; None where it has no experts."""
    blocks = find_experts(chain.model, chain.runner.blocks)
    if not any(blocks) or why_no_banks(chain.config):
        return None
    found = experts_as_computed(chain.layouts, blocks, chain.dtype)
    return expert_figures(found, _frozen([unit.layout for unit in found.commons], chain.num_blocks), chain.dtype, on_cpu=True)
