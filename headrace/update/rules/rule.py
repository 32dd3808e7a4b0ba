"""What an update rule is: the contract that every rule keeps, and what rules share that update each element alone.

The rules are not here (`rules/`), nor the compiled loops (`loops`), the planes on tensors (`tensors`), threads and devices
(`sites/`).

Invariant: all forms of a rule take the same scalars, computed in double precision and rounded to fp32 once, so they cannot
differ in them.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.terms.errors import ConfigError
from headrace.terms.layout import GroupRange, PlaneSet
from headrace.terms.rule_figures import RuleFigures
from headrace.update.rules.loops import StateCode, coded_loop, plain_loop, summed_loop
from headrace.update.rules.tensors import Noise, Scalars, Updated, update_tensors

_Array = TypeVar("_Array")

# NumPy types of a gradient; uint16 stands for the bits of bfloat16.
GRADIENT_DTYPES = ("uint16", "float32", "float16")
_WORD_BYTES = 8  # a checksum adds words of so many bytes
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
_GRADIENT_TENSORS = (torch.bfloat16, torch.float32, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScalars:
    """What one update of a unit is given besides the gradient, whatever the rule.

    `update` counts the updates applied to the unit from 1: the first is 1, a skipped step does not count. `gradient_scale`
    multiplies the gradient first: it is the clip factor divided by the loss scale.

    Raises:
        ConfigError: `update` below 1, or a scalar that is not finite.
    """

    learning_rate: float
    update: int
    gradient_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.update < 1:
            raise ConfigError(f"update: updates are counted from 1, found {self.update}")
        if not (math.isfinite(self.learning_rate) and math.isfinite(self.gradient_scale)):
            raise ConfigError(f"expected finite scalars for the update; skip the step instead: {self}")


@dataclass(frozen=True, slots=True)
class Summing:
    """Checksums (`store.checksum`) of what will be written, taken along with an update: of the weights, and of all states as
    one.

    `first_words`, int64 `(1 + number of state planes,)`, is for the weights and each state plane in order. It has the index of
    the array's first 64-bit word in the written range. The sums are added to `totals` (uint64: weights, states).
    """

    first_words: NDArray[np.int64]
    totals: NDArray[np.uint64]


class Checksums(NamedTuple):
    """The checksums of a chunk's weights and of its states, as they are after the update."""

    weights: int
    states: int


def noise_key(update: int, unit: int) -> int:
    """Return the 32 bits that decide the random roundings of a unit in one of its updates: they depend on these numbers alone.

    So a resumed run, and any placement of the states, rounds every state as an unbroken run does.
    """
    return int.from_bytes(hashlib.blake2b(f"{update}/{unit}".encode(), digest_size=4).digest(), "little")


def group_pieces(groups: Sequence[GroupRange], start: int, stop: int) -> list[GroupRange]:
    """Return the parts of `groups` that lie inside elements `[start, stop)` of a unit, in order.

    Raises:
        ConfigError: the groups leave a gap in the range or overlap: some element would not be updated, or updated twice.
    """
    pieces: list[GroupRange] = []
    reached = start
    for group in sorted(groups, key=lambda group: group.start):
        piece = replace(group, start=max(group.start, start), stop=min(group.stop, stop))
        if piece.start >= piece.stop:
            continue
        if piece.start != reached:
            break
        pieces.append(piece)
        reached = piece.stop
    if reached != stop:
        found = ", ".join(f"[{group.start}, {group.stop})" for group in groups)
        raise ConfigError(
            f"update of elements [{start}, {stop}): expected groups without gap or overlap, found {found or 'none'}"
        )
    return pieces


def refuse_cut_blocks(planes: PlaneSet, starts: Iterable[int]) -> None:
    """Raise ConfigError if a range that begins at one of `starts` cuts a block of elements that share a number."""
    for start in starts:
        if start % planes.block_elements:
            raise ConfigError(
                f"update: states come in blocks of {planes.block_elements} elements, and a range or group "
                f"begins at element {start}; lay the unit out with that alignment"
            )


@dataclass(frozen=True, slots=True)
class Chunk(Generic[_Array]):
    """What an update works on: `weight` and `states` are changed in place by `gradient`. All are flat; element 0 is element
    `first_element` of `unit`, which a rule that rounds at random needs.
    """

    weight: _Array
    states: tuple[_Array, ...]
    gradient: _Array
    unit: int = 0
    first_element: int = 0


class UpdateRule(Protocol):
    """Changes weights and states by one gradient, in blocks of `planes.block_elements`: no block depends on another.

    So any cut of a unit between blocks, in any order and any threads, gives the same bits, and host and device give the same.
    `headrace.testing.rule_contract` checks that, and the rest of this contract.
    """

    @property
    def figures(self) -> RuleFigures:
        """What a planner knows of the rule: planes, grain, costs."""
        ...

    @property
    def planes(self) -> PlaneSet:
        """The planes that the rule reads and writes."""
        ...

    @property
    def sums(self) -> bool:
        """Whether `apply` can take checksums on the way."""
        ...

    def apply(
        self,
        chunk: Chunk[NDArray[Any]],
        step: StepScalars,
        weight_decay: float,
        learning_rate_scale: float,
        summing: Summing | None = None,
    ) -> None:
        """Update a chunk in place; with `summing`, add checksums of the result. Runs in one thread, without the GIL.

        Shapes: `(n,)`, of a state plane `(planes.states[i].num_values(n),)`; contiguous, not overlapping. The weight has the
        type of `planes.weight`, states those of `planes.states` in order; the gradient is uint16 (bfloat16 bits), float32 or
        float16.

        Raises:
            ConfigError: an array of another type or length, or a range that cuts a block; nothing has been changed then.
        """
        ...

    def apply_to_tensors(
        self, chunk: Chunk[Tensor], step: StepScalars, weight_decay: float, learning_rate_scale: float
    ) -> None:
        """Update tensors in place, on their device and its current stream: the same as `apply`, with the same bits.

        `weight` may also be the bits of bfloat16 numbers; the gradient is bfloat16, float32 or float16.

        Raises:
            ConfigError: a tensor of another type, length or device, or a range that cuts a block; nothing is changed then.
        """
        ...


class ElementRule(ABC):
    """A rule under which the new value of an element follows from its master, its states, its gradient and some scalars.

    A subclass gives its scalars, one element's arithmetic, and the same arithmetic on tensors. Planes of all compute types,
    checksums, codes of states, threads and devices follow from these. `planes.states` begin with the rest of the master, if
    there is one; then come the rule's own.
    """

    element: ClassVar[Callable[..., Any]]
    """`element(p, gradient, states, scalars)` returns `(p, states)` of one element: fp32 numbers, marked `loops.inlined`.

    A static method. What it calls stands in its own file (or in `kernels`): the key of its machine code is a digest of these.
    """

    def __init__(self, figures: RuleFigures, code: StateCode | None = None) -> None:
        self.figures, self.planes, self._code = figures, figures.planes, code

    @abstractmethod
    def scalars(self, step: StepScalars, weight_decay: float, learning_rate_scale: float) -> Scalars:
        """Return the scalars for `element`, always the same number of them, in double precision."""

    @abstractmethod
    def on_tensors(self, p: Tensor, gradient: Tensor, states: Sequence[Tensor], scalars: Scalars) -> Updated:
        """Return the new fp32 `p` and `states`: `element` as torch operations on whole tensors, rounding in the same way.

        `scalars` are exactly representable in fp32; `gradient` is fp32, bfloat16 or float16.
        """

    @property
    def sums(self) -> bool:
        """Whether `apply` can take checksums on the way: it can where states are kept unchanged, without a code."""
        return self._code is None

    def apply(
        self,
        chunk: Chunk[NDArray[Any]],
        step: StepScalars,
        weight_decay: float,
        learning_rate_scale: float,
        summing: Summing | None = None,
    ) -> None:
        """Update a chunk in place: see `UpdateRule.apply`."""
        weight, states, gradient = chunk.weight, chunk.states, chunk.gradient
        self._check(weight, states, gradient)
        refuse_cut_blocks(self.planes, (chunk.first_element,))
        scalars = np.array(self.scalars(step, weight_decay, learning_rate_scale), np.float32)
        planes, gradient, kind = (_integers(weight), *states), _tagged(gradient), (type(self).element, scalars.size)
        if summing is not None:
            self._check_sums((weight, *states))
            summed_loop(*kind)(gradient, scalars, summing.first_words, summing.totals, *planes)
        elif self._code is None:
            plain_loop(*kind)(gradient, scalars, *planes)
        else:
            key = np.uint32(noise_key(step.update, chunk.unit))
            coded_loop(*kind, self._code)(gradient, scalars, chunk.first_element, key, *planes)

    @torch.no_grad()
    def apply_to_tensors(
        self, chunk: Chunk[Tensor], step: StepScalars, weight_decay: float, learning_rate_scale: float
    ) -> None:
        """Update tensors in place: see `UpdateRule.apply_to_tensors`."""
        weight, states, gradient = chunk.weight, chunk.states, chunk.gradient
        self._check_tensors(weight, states, gradient)
        refuse_cut_blocks(self.planes, (chunk.first_element,))
        scalars = np.array(self.scalars(step, weight_decay, learning_rate_scale), np.float32).tolist()

        def update(p: Tensor, own: Sequence[Tensor]) -> Updated:
            if self._code is None:
                return self.on_tensors(p, gradient, own, scalars)
            p, new = self.on_tensors(p, gradient, self._code.decode_tensors(own), scalars)
            return p, self._code.encode_tensors(new, Noise(noise_key(step.update, chunk.unit), chunk.first_element))

        new_weight, new_states = update_tensors(weight, states, update)
        weight.copy_(new_weight)
        for state, new_state in zip(states, new_states, strict=True):
            state.copy_(new_state.view(state.dtype))

    def _check(self, weight: NDArray[Any], states: tuple[NDArray[Any], ...], gradient: NDArray[Any]) -> None:
        """Raise ConfigError unless a compiled loop can run over the arrays without leaving them."""
        self._check_count(states)
        for plane, array in zip((self.planes.weight, *self.planes.states), (weight, *states), strict=True):
            _check_array(plane.name, array, (plane.dtype,), plane.num_values(weight.size))
        _check_array("gradient", gradient, GRADIENT_DTYPES, weight.size)

    def _check_sums(self, planes: tuple[NDArray[Any], ...]) -> None:
        if not self.sums:
            raise ConfigError("update: checksums cannot be computed with states of fewer than 32 bits")
        if any(plane.nbytes % _WORD_BYTES for plane in planes):
            raise ConfigError(f"update: checksums are of whole words of {_WORD_BYTES} bytes, found {planes[0].size} elements")

    def _check_tensors(self, weight: Tensor, states: tuple[Tensor, ...], gradient: Tensor) -> None:
        """Raise ConfigError unless the tensors have the types and lengths of the planes and are on one device."""
        self._check_count(states)
        length = weight.numel()
        _check_tensor("weight", weight, _WEIGHT_DTYPES[self.planes.compute_dtype], length, weight.device)
        _check_tensor("gradient", gradient, _GRADIENT_TENSORS, length, weight.device)
        for plane, state in zip(self.planes.states, states, strict=True):
            _check_tensor(plane.name, state, _STATE_DTYPES[plane.dtype], plane.num_values(length), weight.device)

    def _check_count(self, states: tuple[Any, ...]) -> None:
        count = len(self.planes.states)
        if len(states) != count:
            raise ConfigError(f"update: {self.planes.compute_dtype} has {count} state planes, found {len(states)}")


def _check_array(name: str, array: NDArray[Any], dtypes: tuple[str, ...], num_elements: int) -> None:
    if array.dtype.name in dtypes and array.shape == (num_elements,) and array.flags.c_contiguous:
        return
    raise ConfigError(
        f"update: {name} must be a contiguous array of {num_elements} elements of {' or '.join(dtypes)}; "
        f"found shape {array.shape}, {array.dtype.name}, strides {array.strides}"
    )


def _check_tensor(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], num_elements: int, device: torch.device) -> None:
    if tensor.dtype in dtypes and tensor.shape == (num_elements,) and tensor.device == device:
        return
    raise ConfigError(
        f"update: {name} must have shape ({num_elements},), be {' or '.join(map(str, dtypes))} and on {device}; "
        f"found shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
    )


def _integers(weight: NDArray[Any]) -> NDArray[Any]:
    """Return float16 weights as their bits, which the loops write."""
    return weight.view("uint16") if weight.dtype.name == "float16" else weight


def _tagged(gradient: NDArray[Any]) -> NDArray[Any]:
    """Return a float16 gradient as int16, the type by which the loops distinguish it from bfloat16 bits."""
    return gradient.view("int16") if gradient.dtype.name == "float16" else gradient
