"""AdamW on the CPU: checks the arrays and hands them to the compiled loop of their plane set.

Not here: the loops (`kernels`), the scalars (`base.adamw_coefficients`), threads (`parallel`).

Invariant: a loop only ever sees contiguous arrays of one length and of the types it was written for.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.terms.errors import ConfigError
from headrace.terms.layout import PlaneSet, plane_set
from headrace.update import kernels
from headrace.update.rule import GRADIENT_DTYPES, StepHyper, Summing, adamw_coefficients, noise_key, refuse_cut_blocks

# By compute dtype and moments.
_LOOPS: dict[tuple[str, str], Callable[..., None]] = {
    ("bfloat16", "float32"): kernels.adamw_bfloat16,
    ("float32", "float32"): kernels.adamw_float32,
    ("float16", "float32"): kernels.adamw_float16,
    ("bfloat16", "bfloat16"): kernels.adamw_bfloat16_bfloat16,
    ("float32", "bfloat16"): kernels.adamw_float32_bfloat16,
    ("float16", "bfloat16"): kernels.adamw_float16_bfloat16,
    ("bfloat16", "int8"): kernels.adamw_bfloat16_int8,
    ("float32", "int8"): kernels.adamw_float32_int8,
    ("float16", "int8"): kernels.adamw_float16_int8,
}
# Those that take checksums on the way, by compute dtype: with moments as they are by default.
_SUMMED_LOOPS: dict[str, Callable[..., None]] = {
    "bfloat16": kernels.adamw_bfloat16_summed,
    "float32": kernels.adamw_float32_summed,
    "float16": kernels.adamw_float16_summed,
}
_WORD_BYTES = 8


class AdamWRule:
    """AdamW over the planes of one compute dtype, with moments kept as `moments`; an `UpdateRule`.

    `torch.optim.AdamW`'s arithmetic in fp32, every operation rounded once: the bits of `reference.update_tensors`. A result
    that is NaN becomes the quiet NaN in `hi`, whatever its payload. Moments of fewer than 32 bits take part in the update
    unrounded, and are then rounded at random, without bias.

    Raises:
        ConfigError: there is no such plane set.
    """

    def __init__(self, compute_dtype: str, moments: str = "float32") -> None:
        self._planes = plane_set(compute_dtype, moments)
        self._loop = _LOOPS[compute_dtype, moments]
        self._summed_loop = _SUMMED_LOOPS[compute_dtype] if moments == "float32" else None

    @property
    def planes(self) -> PlaneSet:
        """The planes that the rule reads and writes."""
        return self._planes

    @property
    def sums(self) -> bool:
        """Whether `apply` can take checksums on the way: with float32 moments."""
        return self._summed_loop is not None

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
        """Update `weight` and `states` in place: see `UpdateRule.apply`.

        Cost: one pass; bfloat16 and float32 planes move 26 bytes per element with a 2-byte gradient, float16 planes 28.
        Checksums make it a quarter (AMD) to more than half (Cascade Lake) longer, a pass of their own
        twice that (bench/kernel.py).
        """
        self._check(weight, states, gradient)
        refuse_cut_blocks(self._planes, (first_element,))
        coefficients = adamw_coefficients(hyper, weight_decay, learning_rate_scale).vector()
        arrays = (_integers(weight), *states, _tagged(gradient), coefficients)
        if summing is not None:
            self._apply_and_sum(arrays, (weight, *states), summing)
        elif self._planes.moments == "float32":
            self._loop(*arrays)
        else:
            self._loop(*arrays, first_element, np.uint32(noise_key(hyper.step, unit)))

    def _apply_and_sum(self, arrays: tuple[NDArray[Any], ...], planes: tuple[NDArray[Any], ...], summing: Summing) -> None:
        if self._summed_loop is None:
            raise ConfigError(f"update: no checksums are taken along with {self._planes.moments} moments")
        if any(plane.nbytes % _WORD_BYTES for plane in planes):
            raise ConfigError(f"update: checksums are of whole words of {_WORD_BYTES} bytes, found {planes[0].size} elements")
        self._summed_loop(*arrays, tuple(plane.view(np.uint64) for plane in planes), summing.first_words, summing.totals)

    def _check(self, weight: NDArray[Any], states: tuple[NDArray[Any], ...], gradient: NDArray[Any]) -> None:
        planes = (self._planes.weight, *self._planes.states)
        if len(states) != len(self._planes.states):
            raise ConfigError(f"update: {self._planes.compute_dtype} has {len(planes) - 1} state planes, found {len(states)}")
        for plane, array in zip(planes, (weight, *states), strict=True):
            _check_array(plane.name, array, (plane.dtype,), plane.num_values(weight.size))
        _check_array("gradient", gradient, GRADIENT_DTYPES, weight.size)


def _check_array(name: str, array: NDArray[Any], dtypes: tuple[str, ...], num_elements: int) -> None:
    """Raise ConfigError unless `array` is one a compiled loop can run over without leaving it."""
    if array.dtype.name in dtypes and array.shape == (num_elements,) and array.flags.c_contiguous:
        return
    raise ConfigError(
        f"update: {name} must be a contiguous array of {num_elements} elements of {' or '.join(dtypes)}; "
        f"found shape {array.shape}, {array.dtype.name}, strides {array.strides}"
    )


def _integers(weight: NDArray[Any]) -> NDArray[Any]:
    """Return float16 weights as their bits, which is how the loops write them."""
    return weight.view("uint16") if weight.dtype.name == "float16" else weight


def _tagged(gradient: NDArray[Any]) -> NDArray[Any]:
    """Return a float16 gradient as int16: the type by which the loops tell it from bfloat16 bits."""
    return gradient.view("int16") if gradient.dtype.name == "float16" else gradient
