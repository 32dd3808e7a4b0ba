"""The update rule on tensors that live on a device, in place, a chunk at a time.

Not here: streams; the operations run on the current stream of the tensors' device. Not here: the formula (`reference`).

Invariant: the bits of the compiled loops on the CPU, and temporaries of at most `temporary_bytes`, however large the unit is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.terms.errors import ConfigError
from headrace.terms.layout import GroupRange, PlaneSet, plane_set
from headrace.terms.sizes import round_up
from headrace.update.reference import Noise, update_tensors
from headrace.update.rule import (
    Coefficients,
    StepHyper,
    adamw_coefficients,
    group_pieces,
    noise_key,
    refuse_cut_blocks,
)

_WEIGHT_DTYPES = {
    "bfloat16": (torch.bfloat16, torch.int16, torch.uint16),
    "float32": (torch.float32,),
    "float16": (torch.float16,),
}
_STATE_DTYPES = {
    "int16": (torch.int16,),
    "float32": (torch.float32,),
    "uint16": (torch.uint16, torch.int16),
    "int8": (torch.int8,),
    "uint8": (torch.uint8,),
}
_GRADIENT_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# The most that is alive at once beside the planes, per element of a chunk; a test traces it.
_TEMPORARY_BYTES_PER_ELEMENT = {"float32": 36, "bfloat16": 48, "int8": 76}


class DeviceUpdater:
    """AdamW over planes of one compute dtype that live on a device, with moments kept as `moments`.

    Large chunks keep the device busy, small ones keep the temporaries small: 2^20 elements are 36 MiB. They are rounded up to
    whole blocks of the moments.

    Raises:
        ConfigError: there is no such plane set, or `chunk_elements` is not positive.
    """

    def __init__(self, compute_dtype: str, moments: str = "float32", *, chunk_elements: int = 1 << 20) -> None:
        if chunk_elements < 1:
            raise ConfigError(f"chunk_elements: expected a positive number, found {chunk_elements}")
        self.planes: PlaneSet = plane_set(compute_dtype, moments)
        self.chunk_elements = round_up(chunk_elements, self.planes.block_elements)

    @property
    def temporary_bytes(self) -> int:
        """The most device memory that `update_range` allocates at once, allocator rounding aside."""
        return self.chunk_elements * _TEMPORARY_BYTES_PER_ELEMENT[self.planes.moments]

    @torch.no_grad()
    def update_range(
        self,
        weight: Tensor,
        states: tuple[Tensor, ...],
        gradient: Tensor,
        hyper: StepHyper,
        groups: Sequence[GroupRange],
        start: int,
        stop: int,
        unit: int = 0,
    ) -> None:
        """Update elements `[start, stop)` of `unit` in place: as `Updater.update_range`, on tensors.

        Shapes: as there; index 0 is for the unit's element `start`. `weight` is a tensor of the compute dtype (bfloat16 also as
        its bits), the gradient bfloat16, float32 or float16.

        Raises:
            ConfigError: tensors of another type or length, groups that do not cover the range, or a cut block of the planes;
                nothing is changed then.
        """
        self._check(weight, states, gradient, stop - start)
        pieces = group_pieces(groups, start, stop)
        refuse_cut_blocks(self.planes, (piece.start for piece in pieces))
        key = noise_key(hyper.step, unit)
        for piece in pieces:
            coefficients = adamw_coefficients(hyper, piece.weight_decay, piece.learning_rate_scale)
            for begin in range(piece.start, piece.stop, self.chunk_elements):
                part = slice(begin - start, min(begin + self.chunk_elements, piece.stop) - start)
                parts = tuple(
                    state[plane.part(part.start, part.stop)] for plane, state in zip(self.planes.states, states, strict=True)
                )
                _update_chunk(weight[part], parts, gradient[part], coefficients, Noise(key, begin))

    def _check(self, weight: Tensor, states: tuple[Tensor, ...], gradient: Tensor, num_elements: int) -> None:
        """Raise ConfigError unless the tensors have the types of the planes and `num_elements` elements each."""
        if len(states) != len(self.planes.states):
            raise ConfigError(
                f"update: {self.planes.compute_dtype} has {len(self.planes.states)} state planes, found {len(states)}"
            )
        expected: list[tuple[str, Tensor, tuple[torch.dtype, ...], int]] = [
            ("weight", weight, _WEIGHT_DTYPES[self.planes.compute_dtype], num_elements),
            ("gradient", gradient, _GRADIENT_DTYPES, num_elements),
        ]
        for plane, state in zip(self.planes.states, states, strict=True):
            expected.append((plane.name, state, _STATE_DTYPES[plane.dtype], plane.num_values(num_elements)))
        for name, tensor, dtypes, length in expected:
            if tensor.dtype not in dtypes or tensor.shape != (length,) or tensor.device != weight.device:
                raise ConfigError(
                    f"update: {name} must have shape ({length},), be {' or '.join(map(str, dtypes))} and on "
                    f"{weight.device}; found shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
                )


def _update_chunk(weight: Tensor, states: tuple[Tensor, ...], gradient: Tensor, k: Coefficients, noise: Noise) -> None:
    """Update one chunk in place. A function of its own, so that its temporaries end with it."""
    new_weight, new_states = update_tensors(weight, states, gradient, k, noise)
    weight.copy_(new_weight)
    for state, new_state in zip(states, new_states, strict=True):
        state.copy_(new_state)
