"""The weights that compute reads are made of what lies on the drive and what is trained besides: for a step, for an evaluation
and for an export by the same code, so that all three see the same bits.
"""

from collections.abc import Sequence

import torch

from headrace.codec import Codec
from headrace.machine.host_memory import Bytes
from headrace.terms.forms import Form
from headrace.terms.layout import Plane, planes_with
from headrace.update.wire import Wire


class Maker:
    """Makes the weights of units of these `forms`; `codec` decodes what is coded."""

    def __init__(self, forms: Sequence[Form], wire: Wire, compute_dtype: str, codec: Codec | None = None) -> None:
        self.forms, self._wire, self._codec = tuple(forms), wire, codec
        self.weight: Plane = planes_with(compute_dtype, ()).weight
        self.dtype: torch.dtype = getattr(torch, compute_dtype)

    def encode(self, unit: int, weights: torch.Tensor, into: Bytes) -> None:
        """Fill `into` with a unit's coded weights: their planes back to back, in whole pages."""
        form = self.forms[unit]
        assert form.code is not None, "the unit is coded"
        assert self._codec is not None, "and so there is a codec"
        places = split(form.code, torch.from_numpy(into), weights.numel())
        for place, plane in zip(places, self._codec.encode(weights), strict=True):
            place.copy_(plane)

    def begin(self, unit: int, weights: torch.Tensor, into: Bytes) -> None:
        """Fill `into` with the first weights of a unit's trained family, float32."""
        form = self.forms[unit]
        assert form.trained is not None, "the unit is trained"
        torch.from_numpy(into).view(torch.float32).copy_(self._wire.first_weights(unit, form.layout, form.trained, weights))

    @torch.no_grad()
    def make(self, unit: int, stored: torch.Tensor | None, trained: torch.Tensor | None, into: torch.Tensor) -> None:
        """Fill `into`, a flat tensor of the compute dtype, with the weights of `unit`.

        `stored` are its bytes as they lie on the drive (None: `into` has them already), `trained` its trained family's weights,
        float32; all of them on one device.
        """
        form = self.forms[unit]
        if form.code is not None:
            assert stored is not None, "coded weights are not yet what compute reads"
            assert self._codec is not None, "a form with coded weights comes with their codec"
            self._codec.decode(split(form.code, stored, into.numel()), into)
        elif stored is not None:
            into.copy_(stored.view(into.dtype))
        if form.has_own_family:
            assert trained is not None, "a trained family of its own has weights"
            assert form.trained is not None, "and a layout"
            self._wire.complete(unit, form.layout, into, form.trained, trained)


def split(code: Sequence[Plane], stored: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, ...]:
    """Return coded weights' planes, which lie back to back in `stored` (bytes)."""
    found, start = [], 0
    for plane in code:
        stop = start + plane.num_bytes(num_elements)
        found.append(stored[start:stop].view(getattr(torch, plane.dtype)))
        start = stop
    return tuple(found)
