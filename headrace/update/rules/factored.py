"""Second moments of a matrix as one number for each row and each column (Shazeer & Stern 2018, "Adafactor"): what AdaLomo and
Adafactor have in common.

The moment of element (i, j) is estimated as `R_i C_j / mean(R)`. R and C are running means of the squared gradients of rows and
columns: (rows + columns) numbers instead of rows x columns. It is exact where the squares have rank one. A vector has a moment
for each number. A step is scaled down where its root-mean-square exceeds a threshold, and multiplied by that of the weights.
Both are taken over the whole matrix, so it is read three times: for the moments, for the scales, for the update. Each matrix of
a stack (experts) is treated by itself.

Compiled loops exist only for the host, one thread per item. Sums are taken in fp64 in one order, all else in fp64 from fp32
numbers, and kept values are rounded once. Temporaries are a few numbers for each row and column.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.machine.jit import compiled
from headrace.terms.cuts import num_sides
from headrace.terms.errors import ConfigError
from headrace.terms.layout import ItemRange, Plane, planes_with
from headrace.terms.rule_figures import Grain, RuleFigures
from headrace.update.rules.kernels import joined, lower_half, narrowed_float16, not_nan, upper_half, widened
from headrace.update.rules.loops import digest_of, inlined
from headrace.update.rules.rule import StepScalars
from headrace.update.rules.tensor_rule import TensorRule
from headrace.update.rules.tensors import Scalars, Updated

SIDES = Plane("sides", "float32", 4, of="sides")
_FLOPS_PER_ELEMENT = 40  # of the three passes together; a root or a division counts as one
# A core's rate relative to the default rule's loop: three passes, two of them with a root and a division in double precision.
_CORE_RATE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Factoring:
    """What distinguishes the two rules, and what their users choose.

    `added` is added to each squared gradient. `row_floor` is the least mean of R in a division, `moment_floor` the least moment
    under a root. `threshold` bounds the root-mean-square of a step. `weight_floor` is the least root-mean-square of weights by
    which a rate is multiplied. With `decay_follows`, the rate of the decay is multiplied by it, too.
    """

    added: float = 0.0
    row_floor: float = 0.0
    moment_floor: float = 0.0
    threshold: float = 1.0
    weight_floor: float = 1e-3
    decay_follows: bool = False


class FactoredRule(TensorRule):
    """The update by factored moments; a subclass gives its name, its `Factoring`, and the scalars of a step.

    Raises:
        ConfigError: there is no such compute dtype.
    """

    def __init__(self, name: str, compute_dtype: str, factoring: Factoring) -> None:
        super().__init__(
            RuleFigures(
                name=name,
                planes=planes_with(compute_dtype, (SIDES,)),
                grain=Grain.MATRIX,
                takes_vectors=True,
                flops_per_element=_FLOPS_PER_ELEMENT,
                core_rate=_CORE_RATE,
                temporary_bytes=0,  # apart from 8 bytes for each column
                clips_by_rerun=True,
            ),
            None,
        )
        self.factoring = factoring

    @abstractmethod
    def newest_and_rate(self, update: int, rate: float) -> tuple[float, float]:
        """Return the weight of the newest squares in the running means, and the part of a parameter's `rate` to be scaled."""

    def scalars(self, step: StepScalars, weight_decay: float, learning_rate_scale: float) -> Scalars:
        """Return the loops' scalars: the gradient's scale, the fields of `Factoring` in order, and rates."""
        how, whole = self.factoring, step.learning_rate * learning_rate_scale
        newest, rate = self.newest_and_rate(step.update, whole)
        return (
            step.gradient_scale,
            newest,
            how.added,
            how.row_floor,
            how.moment_floor,
            how.threshold,
            how.weight_floor,
            rate,
            whole * weight_decay,
            float(how.decay_follows),
        )

    def on_items(self, p: Tensor, gradient: Tensor, states: Any, scalars: Scalars) -> Updated:  # pragma: no cover
        """Not used: `apply_to_items` runs compiled loops over the planes as they are."""
        raise ConfigError(f"{self.figures.name}: has no form on tensors of fp32 numbers")

    def apply_to_items(
        self, weight: Tensor, states: tuple[Tensor, ...], gradient: Tensor, step: StepScalars, items: ItemRange
    ) -> None:
        """Update the items of `items` in place: see `TensorRule.apply_to_items`.

        Raises:
            ConfigError: a part of an item, or tensors that are not in host memory; nothing is changed then.
        """
        size, sides = items.item_elements, num_sides(items.rows, items.columns)
        count, rest = divmod(weight.numel(), size)
        if rest or weight.device.type != "cpu" or states[-1].numel() != count * sides:
            raise ConfigError(
                f"{self.figures.name}: {weight.numel()} elements on {weight.device} with {states[-1].numel()} numbers of sides "
                f"are no whole items of {items.rows} x {items.columns} in host memory"
            )
        k = np.array(self.scalars(step, items.weight_decay, items.learning_rate_scale), np.float64)
        loop = item_loop(self.planes.compute_dtype)
        planes = [_bits(weight), *map(_bits, states[:-1])]
        numbers, of_gradient = states[-1].numpy(), _bits(gradient)
        for item in range(count):
            place = slice(item * size, (item + 1) * size)
            own = numbers[item * sides : (item + 1) * sides]
            loop(items.rows, items.columns, k, of_gradient[place], own, *(plane[place] for plane in planes))


def _bits(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as the loops need it: bfloat16 as uint16, float16 as int16 (gradients), so that types differ."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    array: NDArray[Any] = tensor.numpy()
    return array.view(np.int16) if array.dtype == np.float16 else array


@inlined
def _load_split(planes: Any, i: Any) -> Any:
    return joined(planes[0][i], planes[1][i])


@inlined
def _store_split(planes: Any, i: Any, p: Any) -> Any:
    p = not_nan(p)
    planes[0][i] = upper_half(p)
    planes[1][i] = lower_half(p)


@inlined
def _load_whole(planes: Any, i: Any) -> Any:
    return planes[0][i]


@inlined
def _store_whole(planes: Any, i: Any, p: Any) -> Any:
    planes[0][i] = p


@inlined
def _load_second(planes: Any, i: Any) -> Any:
    return planes[1][i]


@inlined
def _store_second(planes: Any, i: Any, p: Any) -> Any:
    planes[1][i] = p
    planes[0][i] = narrowed_float16(p)


_MASTERS = {
    "bfloat16": (_load_split, _store_split),
    "float32": (_load_whole, _store_whole),
    "float16": (_load_second, _store_second),
}


@inlined
def _moments_of_vector(columns: Any, k: Any, gradient: Any, sides: Any, moments: Any) -> None:
    """Move the moment of each number of a vector towards its squared gradient."""
    keep = 1.0 - k[1]
    for j in range(columns):
        g = np.float64(widened(gradient[j])) * k[0]
        sides[j] = np.float32(sides[j] * keep + (g * g + k[2]) * k[1])
        moments[j] = sides[j]


@inlined
def _moments_of_matrix(rows: Any, columns: Any, k: Any, gradient: Any, sides: Any, moments: Any) -> Any:
    """Move R and C towards the means of squares of rows and columns; return the divisor of R in the estimate."""
    moments[:] = 0.0
    keep, mean = 1.0 - k[1], 0.0
    for i in range(rows):
        row = 0.0
        for j in range(columns):
            g = np.float64(widened(gradient[i * columns + j])) * k[0]
            row += g * g
            moments[j] += g * g
        sides[i] = np.float32(sides[i] * keep + (row / columns + k[2]) * k[1])
        mean += sides[i]
    for j in range(columns):
        place = rows + j
        sides[place] = np.float32(sides[place] * keep + (moments[j] / rows + k[2]) * k[1])
        moments[j] = sides[place]
    return max(mean / rows, k[3])


@cache
def item_loop(compute_dtype: str) -> Callable[..., None]:
    """Return `loop(rows, columns, k, gradient, sides, *planes)`, which updates one item in place."""
    load, store = _MASTERS[compute_dtype]
    digest = digest_of(load, store)

    @compiled
    def loop(rows: Any, columns: Any, k: Any, gradient: Any, sides: Any, *planes: Any) -> None:
        _ = digest
        moments = np.empty(columns, np.float64)
        mean = 1.0
        if rows == 1:
            _moments_of_vector(columns, k, gradient, sides, moments)
        else:
            mean = _moments_of_matrix(rows, columns, k, gradient, sides, moments)
        of_steps, of_weights = 0.0, 0.0
        for i in range(rows):
            row = 1.0 if rows == 1 else sides[i] / mean
            for j in range(columns):
                place = i * columns + j
                g, p = np.float64(widened(gradient[place])) * k[0], np.float64(load(planes, place))
                of_steps += g * g / max(row * moments[j], k[4])
                of_weights += p * p
        size = rows * columns
        scale = max(1.0, np.sqrt(of_steps / size) / k[5])
        weights = max(k[6], np.sqrt(of_weights / size))
        rate = k[7] * weights / scale
        decay = 1.0 - k[8] * (weights if k[9] != 0.0 else 1.0)
        for i in range(rows):
            row = 1.0 if rows == 1 else sides[i] / mean
            for j in range(columns):
                place = i * columns + j
                g, p = np.float64(widened(gradient[place])) * k[0], np.float64(load(planes, place))
                store(planes, place, np.float32(p * decay - rate * g / np.sqrt(max(row * moments[j], k[4]))))

    return loop


def weight_of_newest(update: int, exponent: float) -> float:
    """Return `update ** exponent` for a negative exponent: 1 at the first update, then falling."""
    return math.pow(update, exponent)
