"""The update rule on tensors that live on a device: in place, a piece at a time.

Streams are not here: the operations run on the current stream of the tensors' device. Nor are formulas (`rules/`).

Invariant: the bits are those of the compiled loops on the CPU, and temporaries take at most `temporary_bytes`, however large
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from headrace.terms.cuts import plane_lengths_of, plane_parts_of
from headrace.terms.errors import ConfigError
from headrace.terms.layout import GroupRange, ItemRange, Padding
from headrace.terms.sizes import round_up
from headrace.update.rules.rule import Chunk, StepScalars, UpdateRule, group_pieces, refuse_cut_blocks
from headrace.update.rules.tensor_rule import item_shares, items_rule


class DeviceUpdater:
    """Applies `rule` to planes that live on a device.

    Large pieces keep the device busy, small ones keep the temporaries small: 36 MiB for 2^20 elements of the default rule. A
    piece is rounded up to whole blocks of the states.

    Raises:
        ConfigError: `piece_elements` is not positive.
    """

    def __init__(self, rule: UpdateRule, *, piece_elements: int = 1 << 20) -> None:
        if piece_elements < 1:
            raise ConfigError(f"piece_elements: expected a positive number, found {piece_elements}")
        self.rule = rule
        self.piece_elements = round_up(piece_elements, rule.planes.block_elements)

    @property
    def temporary_bytes(self) -> int:
        """The most device memory that `update_range` allocates at once, if no item is larger (allocator rounding aside)."""
        return self.piece_elements * self.rule.figures.temporary_bytes

    def update_range(
        self,
        chunk: Chunk[Tensor],
        step: StepScalars,
        groups: Sequence[GroupRange],
    ) -> None:
        """Update a chunk of a unit in place: the same as `Updater.update_range`, on tensors.

        Shapes: as there. Types: see `UpdateRule.apply_to_tensors`.

        Raises: ConfigError: tensors of another type or length, groups that do not cover the range, or a cut block of the
            planes. Nothing is changed then.
        """
        weight, states, gradient = chunk.weight, chunk.states, chunk.gradient
        planes, start = self.rule.planes, chunk.first_element
        stop = start + weight.numel()
        pieces = group_pieces(groups, start, stop)
        lengths = (stop - start, stop - start, *plane_lengths_of(planes.states, pieces, start))
        for tensor, length in zip((weight, gradient, *states), lengths, strict=False):
            if tensor.shape != (length,):
                raise ConfigError(
                    f"update: elements [{start}, {stop}) take tensors of shape ({length},), found {tuple(tensor.shape)}"
                )
        refuse_cut_blocks(planes, (piece.start for piece in pieces))
        shares = list(self._shares(pieces))
        for share, places in zip(shares, plane_parts_of(planes.states, shares, start), strict=True):
            part = slice(share.start - start, share.stop - start)
            parts = tuple(state[place] for state, place in zip(states, places, strict=False))
            if isinstance(share, Padding):
                continue
            if isinstance(share, ItemRange):
                items_rule(self.rule).apply_to_items(weight[part], parts, gradient[part], step, share)
            else:
                scalars = (share.weight_decay, share.learning_rate_scale)
                of_share = Chunk(weight[part], parts, gradient[part], chunk.unit, share.start)
                self.rule.apply_to_tensors(of_share, step, *scalars)

    def _shares(self, pieces: Sequence[GroupRange]) -> Iterator[GroupRange]:
        for piece in pieces:
            if isinstance(piece, Padding):
                yield piece
            elif isinstance(piece, ItemRange):
                yield from item_shares(piece, self.piece_elements)
            else:
                for begin in range(piece.start, piece.stop, self.piece_elements):
                    yield replace(piece, start=begin, stop=min(begin + self.piece_elements, piece.stop))
