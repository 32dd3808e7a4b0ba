"""Samples of packed rows, put into groups that run as rows of their own.

Samples of about one length share a group and are padded on the right: models are causal, so later positions change nothing
before them. Where a model computes by the length of its rows all the same, only samples of exactly one length share a group.
Invariants: each position of the micro-batch is in one group, once; and no group takes more than the whole would.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.terms.packed_rows import grouped


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Rows (n, L) of one sample each: the `places` of their positions among the b*T of the micro-batch, and which are `real`.

    Padding repeats the sample's last position: numbers like any others, whose results are dropped. `kept` are the real
    positions among the n*L, `places_kept` their places in the micro-batch.
    """

    places: torch.Tensor
    real: torch.Tensor
    kept: torch.Tensor
    places_kept: torch.Tensor

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the samples of a tensor (b, T, ...) as rows (n, L, ...)."""
        return tensor.flatten(0, 1)[self.places]

    def gradients_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the gradients (n, L, ...) of the group's results, given those of the micro-batch's (b*T, ...)."""
        return tensor[self.places] * self.real.reshape(*self.real.shape, *[1] * (tensor.dim() - 1))

    def put(self, rows: torch.Tensor, into: torch.Tensor) -> None:
        """Write results (n, L, ...) to their places in those of the micro-batch, (b*T, ...)."""
        into.index_copy_(0, self.places_kept, rows.flatten(0, 1)[self.kept])


def sample_groups_of(position_ids: torch.Tensor, *, exact: bool = False) -> list[SampleGroup]:
    """Return the groups of rows (b, T) whose positions begin again at each sample; empty if every row is one sample.

    `exact`: samples share a group only if they have one length.

    It waits for the device, where the positions are.
    """
    rows, length = position_ids.shape
    samples = []
    for row, positions in enumerate(position_ids.tolist()):
        starts = [0, *(place for place, position in enumerate(positions) if place and not position)]
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            samples.append((row * length + start, stop - start))
    return [_group(group, position_ids.device) for group in grouped(samples, rows, length, exact)]


def _group(samples: Sequence[tuple[int, int]], device: torch.device) -> SampleGroup:
    starts, lengths = (torch.tensor(values)[:, None] for values in zip(*samples, strict=True))
    columns = torch.arange(samples[0][1])[None]
    places, real = starts + torch.minimum(columns, lengths - 1), columns < lengths
    kept = real.flatten().nonzero().flatten()
    return SampleGroup(*(values.to(device) for values in (places, real, kept, places.flatten()[kept])))
