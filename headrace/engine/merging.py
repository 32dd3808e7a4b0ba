"""Adapters merged with their model: an ordinary directory, made from the model's own files.

Invariant: memory holds one block in float32 and the adapters; each weight is rounded once, to the dtype that it came in.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from headrace.machine.host_memory import huge_page_buffer
from headrace.model import Chain, Checkpoint, Exporter, import_unit
from headrace.model.adapters.beside_reading import read_beside
from headrace.model.blocks.beside import StoredBeside
from headrace.model.directory.matching import WeightMap
from headrace.terms.layout import UnitLayout, part
from headrace.terms.options.optimizer import Optimizer


def merge_adapters(model: Path, directory: Path, out: Path, notes: Mapping[str, str]) -> Path:
    """Write the model directory `model`, merged with the adapters in `directory`, to `out`, with `notes` as files; return it.

    If the model is coded, its decoded weights are merged.

    Raises:
        ModelError: the adapters belong to another model, or one of the directories cannot be read.
        RunDirectoryError, ExportFailed: as `Exporter.write`.
    """
    checkpoint = Checkpoint.open(model, decode=True)
    chain = Chain.from_config(checkpoint.config, "float32", Optimizer())
    weights = chain.attach(checkpoint)
    stored = read_beside(directory, chain, weights)
    return Exporter(checkpoint, chain, out, _Merged(chain, weights, stored), notes=notes).write()


class _Merged:
    """Gives the exporter the merged weights of a unit, float32; None for a unit without adapters."""

    def __init__(self, chain: Chain, weights: WeightMap, stored: StoredBeside) -> None:
        self._chain, self._weights, self._stored = chain, weights, stored
        largest = max(chain.layouts[unit].num_elements for unit in stored.flats)
        self._memory = huge_page_buffer(4 * largest).view(np.float32)

    def __call__(self, unit: int) -> tuple[np.ndarray, np.ndarray | None] | None:
        if (flat := self._stored.flats.get(unit)) is None:
            return None
        layout, adapters = self._chain.layouts[unit], self._stored.adapters
        plane = self._memory[: layout.num_elements]
        import_unit(self._weights, layout, plane, None)
        adapters.merge(unit, _views(adapters.layouts[unit], flat), _views(layout, torch.from_numpy(plane)))
        return plane, None


def _views(layout: UnitLayout, flat: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {spec.name: part(flat, spec).view(spec.shape) for spec in layout.parameters}
