"""What an update rule is: the values of one step, and the contract that every rule keeps.

Not here: arithmetic on arrays (`kernels` on the CPU, `reference` on tensors) and threads (`parallel`).

Invariant: all forms of a rule take their scalars from one `Coefficients`, rounded to fp32 once, so they cannot differ in them.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.terms.errors import ConfigError
from headrace.terms.layout import GroupRange, PlaneSet

# NumPy types of a gradient; uint16 stands for bfloat16 bits.
GRADIENT_DTYPES = ("uint16", "float32", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHyper:
    """The scalars of one update.

    `step` counts applied updates from 1: the first is 1, a skipped step does not count. `gradient_scale` multiplies the
    gradient before all else: the clip factor divided by the loss scale.

    Raises:
        ConfigError: `step` below 1, or a scalar that is not finite.
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    step: int
    gradient_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ConfigError(f"step: updates are counted from 1, found {self.step}")
        scalars = (self.learning_rate, self.beta1, self.beta2, self.eps, self.gradient_scale)
        if not all(math.isfinite(scalar) for scalar in scalars):
            raise ConfigError(f"expected finite scalars for the update; skip the step instead: {self}")


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The scalars as the element loop uses them, each exactly representable in fp32.

    g = gradient * gradient_scale
    m = (g if from_gradient else m) + (g - m) * moment
    v = v * keep + (g * gain) * g
    p = p * decay - (m * rate) / (sqrt(v) * correction + eps)
    """

    gradient_scale: float
    decay: float
    from_gradient: float
    moment: float
    keep: float
    gain: float
    rate: float
    correction: float
    eps: float

    def vector(self) -> NDArray[np.float32]:
        """Return the fields in order as float32, which is how the compiled loops take them."""
        return np.array(astuple(self), np.float32)


@dataclass(frozen=True, slots=True)
class Summing:
    """Checksums (`store.checksum`) taken along with an update, of what will be written: the weights, and all states as one.

    `first_words` has, for the weights and each state plane in order, the index of the array's first 64-bit word in what is
    written, `(1 + number of state planes,)` int64; `totals` (uint64: weights, states) are added to.
    """

    first_words: NDArray[np.int64]
    totals: NDArray[np.uint64]


class Checksums(NamedTuple):
    """Of a chunk's weights and of its states, as they are after the update."""

    weights: int
    states: int


def adamw_coefficients(hyper: StepHyper, weight_decay: float, learning_rate_scale: float) -> Coefficients:
    """Return the scalars of AdamW (Loshchilov & Hutter 2019, algorithm 2), as `torch.optim.AdamW` defines them.

    Computed in double precision, then rounded to fp32 once. The first moment is interpolated from its nearer end, as
    `torch.lerp` does: with `beta1 = 0` it is the gradient itself. Where torch divides by `sqrt(1 - beta2^step)`, the loop
    multiplies by its inverse: one division less, and torch on a GPU divides by a scalar in the same way.
    """
    learning_rate = hyper.learning_rate * learning_rate_scale
    toward = 1.0 - hyper.beta1
    near = toward < 0.5
    exact = (
        hyper.gradient_scale,
        1.0 - learning_rate * weight_decay,
        0.0 if near else 1.0,
        toward if near else -hyper.beta1,
        hyper.beta2,
        1.0 - hyper.beta2,
        learning_rate / (1.0 - hyper.beta1**hyper.step),
        1.0 / math.sqrt(1.0 - hyper.beta2**hyper.step),
        hyper.eps,
    )
    return Coefficients(*(float(np.float32(value)) for value in exact))


def noise_key(step: int, unit: int) -> int:
    """Return the 32 bits that place the random roundings of one unit in one update: a function of these numbers alone.

    So a resumed run, and any placement of the states, rounds every moment as an unbroken one does.
    """
    return int.from_bytes(hashlib.blake2b(f"{step}/{unit}".encode(), digest_size=4).digest(), "little")


def group_pieces(groups: Sequence[GroupRange], start: int, stop: int) -> list[GroupRange]:
    """Return the parts of `groups` inside elements `[start, stop)` of a unit, in order.

    Raises:
        ConfigError: the groups leave a gap in the range or overlap: some element would be updated never, or twice.
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
                f"update: {planes.moments} moments come in blocks of {planes.block_elements} elements, and a range or group "
                f"begins at element {start}; lay the unit out with that alignment"
            )


class UpdateRule(Protocol):
    """Changes weights and states by one gradient, block by block of `planes.block_elements`: no block depends on another.

    So any cut of a unit between blocks, in any order and in any threads, gives the same bits.
    """

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
        weight: NDArray[Any],
        states: tuple[NDArray[Any], ...],
        gradient: NDArray[Any],
        hyper: StepHyper,
        weight_decay: float,
        learning_rate_scale: float,
        unit: int = 0,
        first_element: int = 0,
        summing: Summing | None = None,
    ) -> None:
        """Update `weight` and `states` in place; with `summing`, add to checksums of what they become. One thread, no GIL.

        Shapes: `(n,)`, of a state plane `(planes.states[i].num_values(n),)`; contiguous, not overlapping. `weight` has the type
        of `planes.weight`, `states` those of `planes.states` in order; `gradient` is uint16 (bfloat16 bits), float32 or
        float16. The arrays begin at element `first_element` of `unit`: a rule that rounds at random needs to know.

        Raises:
            ConfigError: an array of another type or length, or a range that cuts a block; nothing has been changed then.
        """
        ...
