"""The weights that compute reads are made from the frozen weights on the drive and the trained family.

A step, an evaluation and an export use the same code, so all three see the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from headrace.codec import Codec, Parts
from headrace.machine.host_memory import Bytes
from headrace.terms.coding import PLAIN, CodedMatrix
from headrace.terms.forms import Form
from headrace.terms.layout import Plane, planes_with

if TYPE_CHECKING:  # a generation makes weights without what trains them
    from headrace.update.wires.wire import Wire


class Maker:
    """Makes the weights of units with these `forms`; `codecs`, by name, decode coded weights. `readers` give the parts of
    weights that the model's files already hold coded, by unit and by the offset of the matrix.
    """

    def __init__(
        self,
        forms: Sequence[Form],
        wire: "Wire",
        compute_dtype: str,
        codecs: Mapping[str, Codec] | None = None,
        readers: Mapping[tuple[int, int], Callable[[], Parts]] | None = None,
    ) -> None:
        self.forms, self._wire, self._codecs, self._readers = tuple(forms), wire, dict(codecs or {}), dict(readers or {})
        self.weight: Plane = planes_with(compute_dtype, ()).weight
        self.dtype: torch.dtype = getattr(torch, compute_dtype)

    def encode(self, unit: int, weights: torch.Tensor, into: Bytes) -> None:
        """Fill `into` with a unit's coded weights: the parts of its matrices, each in its place."""
        form = self.forms[unit]
        assert form.code is not None, "the unit is coded"
        stored = torch.from_numpy(into)
        for matrix in form.code.matrices:
            places, dense = parts_of(matrix, stored), _dense(matrix, weights)
            made = {PLAIN: dense} if matrix.codec is None else self._parts(unit, matrix, dense)
            for name, part in made.items():
                places[name].copy_(part)

    def _parts(self, unit: int, matrix: CodedMatrix, dense: torch.Tensor) -> Parts:
        """Return the parts of a matrix: those that its file has, or what its code makes of it."""
        assert matrix.codec is not None, "it is coded"
        reader = self._readers.get((unit, matrix.offset))
        return self._codecs[matrix.codec].encode(dense) if reader is None else reader()

    def begin(self, unit: int, weights: torch.Tensor, into: Bytes) -> None:
        """Fill `into` with the first weights of a unit's trained family, float32."""
        form = self.forms[unit]
        assert form.trained is not None, "the unit is trained"
        torch.from_numpy(into).view(torch.float32).copy_(self._wire.first_weights(unit, form.layout, form.trained, weights))

    @torch.no_grad()
    def make(self, unit: int, stored: torch.Tensor | None, trained: torch.Tensor | None, into: torch.Tensor) -> None:
        """Fill `into`, a flat tensor of the compute dtype, with the weights of `unit`.

        `stored` are its bytes as they lie on the drive (None: `into` already has them). `trained` are its trained family's
        weights, float32. All of them are on one device.
        """
        form = self.forms[unit]
        if form.code is not None:
            assert stored is not None, "coded weights are not yet what compute reads"
            self._decode(form.code.matrices, stored, into)
        elif stored is not None:
            into.copy_(stored.view(into.dtype))
        if form.is_completed:
            assert trained is not None, "a trained family of its own has weights"
            self.complete(unit, into, trained)

    @torch.no_grad()
    def complete(self, unit: int, into: torch.Tensor, trained: torch.Tensor) -> None:
        """Complete the frozen weights in `into` (compute dtype, or their fp32 master) with what is `trained`."""
        form = self.forms[unit]
        assert form.trained is not None, "a trained family has a layout"
        self._wire.complete(unit, form.layout, into, form.trained, trained)

    def _decode(self, matrices: Sequence[CodedMatrix], stored: torch.Tensor, into: torch.Tensor) -> None:
        for matrix in matrices:
            parts, dense = parts_of(matrix, stored), _dense(matrix, into)
            if matrix.codec is None:
                dense.copy_(parts[PLAIN])
            else:
                self._codecs[matrix.codec].decode(parts, dense, range(matrix.rows))


def parts_of(matrix: CodedMatrix, stored: torch.Tensor) -> Parts:
    """Return the parts of a coded matrix as views of its unit's bytes."""
    return {
        part.name: stored[start : start + part.num_bytes].view(getattr(torch, part.dtype)).view(part.shape)
        for start, part in matrix.parts
    }


def _dense(matrix: CodedMatrix, slot: torch.Tensor) -> torch.Tensor:
    """Return a matrix as a view of its unit's dense slot."""
    return slot[matrix.offset : matrix.offset + matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)
