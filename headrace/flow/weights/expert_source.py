"""A source of weights for single experts: blocks without experts, and experts, from the model's own files."""

from collections.abc import Mapping, Sequence

import torch

from headrace.files import Reader
from headrace.files.block_file import Ticket
from headrace.machine.host_memory import Bytes
from headrace.model import WeightMap, import_unit
from headrace.model.blocks.binding import Bound
from headrace.model.directory.in_place import StoredUnit
from headrace.model.parts.banks import BlockExperts
from headrace.model.streams.stored_experts import StoredExperts
from headrace.plan.value.expert_plan import ExpertFigures
from headrace.terms.forms import UnitFigures
from headrace.terms.layout import Plane


class FileSource:
    """What is alike in sources of a model's own files: `units` as they lie there, read by `reader`.

    `others` give what units have in the place of views of their slots.
    """

    def __init__(self, units: Sequence[StoredUnit], reader: Reader, weights: WeightMap, plane: Plane) -> None:
        self._units, self.reader, self._weights, self._plane = tuple(units), reader, weights, plane
        self.layouts = tuple(unit.layout for unit in self._units)
        self.others: Mapping[int, Bound] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes of extents read so far, by the present reader."""
        return self.reader.bytes_read

    def read(self, unit: int, into: Bytes) -> None:
        """See `WeightSource.read`."""
        stored = self._units[unit]
        if stored.extents:
            self.reader.read(stored.extents, into).wait()
        else:
            import_unit(self._weights, stored.layout, into.view(self._plane.dtype), None)

    def read_trained(self, memory: Mapping[int, Bytes]) -> None:
        """See `WeightSource.read_trained`: a file has no trained families, so nothing is done."""

    def make(self, unit: int, stored: torch.Tensor | None, trained: torch.Tensor | None, into: torch.Tensor) -> None:
        """See `WeightSource.make`."""
        assert stored is not None, "a unit of a file is made of what was read"
        self._units[unit].put(stored, into)


class ExpertSource(FileSource):
    """A `GenerationSource` of units without experts, and of experts by unit and number. `blocks` say which attributes are
    experts; `places` say where.

    `figures` are those of the units without experts, `expert_figures` those of the experts. It uses the reader of another
    source, which closes it.
    """

    def __init__(
        self,
        stored: StoredExperts,
        figures: tuple[UnitFigures, ...],
        blocks: Sequence[BlockExperts | None],
        reader: Reader,
        weights: WeightMap,
        plane: Plane,
        figures_of_experts: ExpertFigures,
    ) -> None:
        super().__init__(stored.commons, reader, weights, plane)
        self._experts = stored.experts
        self.places = stored.places(blocks)
        self.figures = figures
        self.by_experts = self.in_codes = None
        self.expert_figures = figures_of_experts

    def expert(self, unit: int, number: int) -> StoredUnit:
        """Return how an expert lies in the files."""
        return self._experts[unit][number]

    def read_expert(self, unit: int, number: int, into: Bytes) -> Ticket:
        """Start reading an expert into the first bytes of `into`."""
        stored = self.expert(unit, number)
        return self.reader.read(stored.extents, into[: stored.num_bytes])

    def make_expert(self, unit: int, number: int, read: torch.Tensor, into: torch.Tensor) -> None:
        """Fill an expert's flat slot `into` from what was read of it."""
        stored = self.expert(unit, number)
        read, into = read[: stored.num_bytes], into[: stored.layout.num_elements]
        if stored.is_made:
            stored.put(read, into)
        else:
            into.copy_(read.view(into.dtype))

    def close(self) -> None:
        """Do nothing: the reader belongs to another source."""


def expert_figures(
    stored: StoredExperts, figures: tuple[UnitFigures, ...], dtype: torch.dtype, *, on_cpu: bool
) -> ExpertFigures:
    """Return the figures of experts, and those of the units without them."""
    every = [expert for experts in stored.experts for expert in experts]
    return ExpertFigures(
        units=figures,
        num_experts=tuple(len(experts) for experts in stored.experts),
        elements=max(expert.layout.num_elements for expert in every),
        stored_bytes=max(expert.num_bytes for expert in every),
        is_made=any(expert.is_made for expert in every),
        making_bytes=max(expert.making_bytes(dtype, on_host=on_cpu) for expert in every),
        num_parameters=max(expert.layout.num_parameters for expert in every),
        decodes=every[0].decodes,
    )
