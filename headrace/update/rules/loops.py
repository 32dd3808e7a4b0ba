"""The compiled loops of every rule: one generator over the master, the rule's arithmetic, its states' code, and checksums.

A rule says how one element changes (`arithmetic`, a function of fp32 numbers). The types of the arrays at the first call tell
where the master lies and in which type. So a run compiles only what it runs. What surrounds the arithmetic is here once:
prefetching, splitting and joining the master, decoding and encoding states tile by tile, checksums.

Invariant: an element's new value depends on that element and the scalars alone, with operations in the order of the arithmetic.
With states of fewer than 32 bits, it also depends on their code (`StateCode`).

Numba keeps machine code on disk and notices a change only in the file that a loop stands in. The inlined functions stand in
several files, so each loop closes over a digest of all of them (`digest_of`). A closure's variables are part of its key.

Legend: `gradient` is uint16 (bfloat16 bits), int16 (float16 bits: the type alone distinguishes them) or float32. `scalars` are
float32, `k` is their array. `planes` are the weights, the rest of the master, and the rule's states. That is `hi, lo` and
states for bfloat16 compute, `w` and states for float32, `w16, w` and states for float16.
"""

import hashlib
import marshal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, overload, register_jitable
from numba.np.arrayobj import make_array
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from headrace.machine import jit
from headrace.machine.jit import JIT_OPTIONS, compiled, full_width
from headrace.store.checksum import add_words
from headrace.terms import layout, split_master
from headrace.update.rules import kernels
from headrace.update.rules.kernels import joined, lower_half, narrowed_float16, not_nan, upper_half, widened
from headrace.update.rules.tensors import Noise

# Elements that are updated, and then summed for their checksums: 448 KiB with two float32 states and the gradient, which fits
# into a second-level cache.
SUMMED_ELEMENTS = 32768

# Loops run over strips, a cache line of the narrowest plane, and prefetch so many elements ahead. A processor's own prefetching
# ends with each page of each array. Measured with two states (docs/log/update-kernel): 1.1 times as fast; 128 to 512 ahead make
# no difference, 1024 is worse. They are unsigned, because each use of an index that may be negative would be tested.
LINE_BYTES = 64
STRIP_ELEMENTS, AHEAD_ELEMENTS = np.uint64(32), np.uint64(256)
# So many elements have their states decoded at once, which is also the most that may share one number of a state plane.
TILE_ELEMENTS = 256

Loop = Callable[..., None]

_Inlined = TypeVar("_Inlined", bound=Callable[..., Any])


def inlined(function: _Inlined) -> _Inlined:
    """Mark `function` as one that loops inline: a rule's arithmetic, a part of a code. In Python it is called as before."""
    marked: _Inlined = register_jitable(**JIT_OPTIONS)(function)
    return marked


@dataclass(frozen=True, slots=True)
class StateCode:
    """How a rule's states are kept in fewer than 32 bits: three functions that loops inline, and the same two on tensors.

    `scratch()` returns an fp32 array of `TILE_ELEMENTS` for each state. `decode(planes, start, stop, tiles)` writes elements
    `[start, stop)` of the planes to them. `encode(tiles, planes, start, stop, first, key)` writes them back. There `first` is
    the number of element `start` in its unit; together with `key` (uint32) it decides the random numbers for rounding.
    `decode_tensors(planes)` returns fp32 states, `encode_tensors(states, noise)` planes of the same bits.
    """

    scratch: Callable[..., Any]
    decode: Callable[..., Any]
    encode: Callable[..., Any]
    decode_tensors: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    encode_tensors: Callable[[Sequence[Tensor], Noise], tuple[Tensor, ...]]


@cache
def plain_loop(arithmetic: Callable[..., Any], num_scalars: int) -> Loop:
    """Return `loop(gradient, k, *planes)`, which updates planes with fp32 states in place.

    `arithmetic(p, g, states, scalars)` returns `(p, states)` of one element; all numbers are fp32.
    """
    digest = digest_of(arithmetic)

    @compiled
    def loop(gradient: Any, k: Any, *planes: Any) -> None:
        full_width()
        _ = digest
        _run(gradient, to_fixed_tuple(k, num_scalars), planes, arithmetic)

    return loop


@cache
def summed_loop(arithmetic: Callable[..., Any], num_scalars: int) -> Loop:
    """Return `loop(gradient, k, first_words, totals, *planes)`, which also adds up checksums of the new planes, tile by tile.

    A pass of its own would read again from memory what the caches hold now, at a quarter of the speed. `first_words` has the
    index of each plane's first 64-bit word in what is written; the sums are added to `totals` (uint64: weights, all states).
    """
    digest = digest_of(arithmetic, add_words)

    @compiled
    def loop(gradient: Any, k: Any, first_words: Any, totals: Any, *planes: Any) -> None:
        full_width()
        _ = digest
        scalars = to_fixed_tuple(k, num_scalars)
        for start in range(0, gradient.size, SUMMED_ELEMENTS):
            stop = min(start + SUMMED_ELEMENTS, gradient.size)
            _run(gradient[start:stop], scalars, _part(planes, start, stop), arithmetic)
            _sum(planes, 0, start, stop, first_words, totals)

    return loop


@cache
def coded_loop(arithmetic: Callable[..., Any], num_scalars: int, code: StateCode) -> Loop:
    """Return `loop(gradient, k, first, key, *planes)` for states that are kept as `code` says.

    One tile at a time is decoded into numbers that stay in the first-level cache, updated there, and encoded again. So the
    update itself is exact, and only the stored states are rounded.
    """
    scratch, decode, encode = code.scratch, code.decode, code.encode
    digest = digest_of(arithmetic, scratch, decode, encode)

    @compiled
    def loop(gradient: Any, k: Any, first: Any, key: Any, *planes: Any) -> None:
        full_width()
        _ = digest
        scalars, tiles = to_fixed_tuple(k, num_scalars), scratch()
        master, coded = _cut(planes)
        for start in range(0, gradient.size, TILE_ELEMENTS):
            stop = min(start + TILE_ELEMENTS, gradient.size)
            states = _part(tiles, 0, stop - start)
            decode(coded, start, stop, states)
            _run(gradient[start:stop], scalars, _part(master, start, stop) + states, arithmetic)
            encode(states, coded, start, stop, first + start, key)

    return loop


def digest_of(*functions: Callable[..., Any]) -> str:
    """Return a digest that changes with any source that a loop of `functions` inlines: this module, and the files of the
    functions. What a rule's arithmetic calls must stand in its own file, or in `kernels`.
    """
    files = {Path(str(module.__file__)) for module in (jit, layout, split_master, kernels)} | {Path(__file__)}
    hasher = hashlib.blake2b(digest_size=16)
    for function in functions:
        file = Path(function.__code__.co_filename)
        if file.is_file():
            files.add(file)
        else:  # the function was written at a prompt
            hasher.update(marshal.dumps(function.__code__))
    for file in sorted(files):
        hasher.update(file.read_bytes())
    return hasher.hexdigest()


@intrinsic  # type: ignore[untyped-decorator]
def _request(context: Any, arrays: Any, first: Any) -> Any:
    """Ask for elements `first` to `first + STRIP_ELEMENTS` of each array to be brought into the caches; they need not exist."""

    def lower(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        word, address = ir.IntType(32), ir.IntType(8).as_pointer()
        signature = ir.FunctionType(ir.VoidType(), [address, word, word, word])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [address], signature)
        for place, array in enumerate(arrays):
            data = make_array(array)(ctx, builder, builder.extract_value(args[0], place)).data
            for element in range(0, int(STRIP_ELEMENTS), LINE_BYTES // (array.dtype.bitwidth // 8)):
                line = builder.gep(data, [builder.add(args[1], ir.Constant(args[1].type, element))])
                # Arguments: for reading, into all levels of the caches, data.
                builder.call(prefetch, [builder.bitcast(line, address), word(0), word(3), word(1)])
        return ctx.get_dummy_value()

    return types.none(arrays, first), lower


@inlined
def _run(gradient: Any, scalars: Any, planes: Any, arithmetic: Any) -> None:
    full_width()
    num_elements = np.uint64(gradient.size)
    whole = num_elements // STRIP_ELEMENTS * STRIP_ELEMENTS
    for start in range(np.uint64(0), whole, STRIP_ELEMENTS):
        _request((gradient, *planes), start + AHEAD_ELEMENTS)
        for j in range(STRIP_ELEMENTS):
            _update(start + j, planes, gradient, scalars, arithmetic)
    for i in range(whole, num_elements):
        _update(i, planes, gradient, scalars, arithmetic)


def _update(i: Any, planes: Any, gradient: Any, scalars: Any, arithmetic: Any) -> None:
    """Update element `i` of `planes` in the way that their types require."""


@overload(_update, jit_options=JIT_OPTIONS)  # type: ignore[untyped-decorator]
def _update_typed(i: Any, planes: Any, gradient: Any, scalars: Any, arithmetic: Any) -> Any:
    def bfloat16(i: Any, planes: Any, gradient: Any, scalars: Any, arithmetic: Any) -> Any:
        states = planes[2:]
        p, new = arithmetic(joined(planes[0][i], planes[1][i]), widened(gradient[i]), _take(states, i), scalars)
        _put(states, i, new)
        p = not_nan(p)
        planes[0][i] = upper_half(p)
        planes[1][i] = lower_half(p)

    def float32(i: Any, planes: Any, gradient: Any, scalars: Any, arithmetic: Any) -> Any:
        states = planes[1:]
        p, new = arithmetic(planes[0][i], widened(gradient[i]), _take(states, i), scalars)
        planes[0][i] = p
        _put(states, i, new)

    def float16(i: Any, planes: Any, gradient: Any, scalars: Any, arithmetic: Any) -> Any:
        states = planes[2:]
        p, new = arithmetic(planes[1][i], widened(gradient[i]), _take(states, i), scalars)
        planes[1][i] = p
        _put(states, i, new)
        planes[0][i] = narrowed_float16(planes[1][i])

    if planes[0].dtype == types.float32:
        return float32
    return bfloat16 if planes[1].dtype == types.int16 else float16


# Functions of tuples whose items differ in type: each handles the first item and calls itself for the others. Numba requires
# that the parameters of a compiled function are written exactly as those of the function that chooses it.


def _take(arrays: Any, i: Any) -> Any:
    """Return element `i` of each array."""


@overload(_take, jit_options=JIT_OPTIONS)  # type: ignore[untyped-decorator]
def _take_typed(arrays: Any, i: Any) -> Any:
    def none(arrays: Any, i: Any) -> Any:
        return ()

    def some(arrays: Any, i: Any) -> Any:
        return (arrays[0][i], *_take(arrays[1:], i))

    return some if len(arrays) else none


def _put(arrays: Any, i: Any, values: Any) -> None:
    """Write `values` to element `i` of each array."""


@overload(_put, jit_options=JIT_OPTIONS)  # type: ignore[untyped-decorator]
def _put_typed(arrays: Any, i: Any, values: Any) -> Any:
    def none(arrays: Any, i: Any, values: Any) -> Any:
        return None

    def some(arrays: Any, i: Any, values: Any) -> Any:
        arrays[0][i] = values[0]
        _put(arrays[1:], i, values[1:])

    return some if len(arrays) else none


def _part(arrays: Any, start: Any, stop: Any) -> Any:
    """Return elements `[start, stop)` of each array."""


@overload(_part, jit_options=JIT_OPTIONS)  # type: ignore[untyped-decorator]
def _part_typed(arrays: Any, start: Any, stop: Any) -> Any:
    def none(arrays: Any, start: Any, stop: Any) -> Any:
        return ()

    def some(arrays: Any, start: Any, stop: Any) -> Any:
        return (arrays[0][start:stop], *_part(arrays[1:], start, stop))

    return some if len(arrays) else none


def _cut(planes: Any) -> Any:
    """Return the planes of the master, and those of the rule's states."""


@overload(_cut, jit_options=JIT_OPTIONS)  # type: ignore[untyped-decorator]
def _cut_typed(planes: Any) -> Any:
    def one(planes: Any) -> Any:
        return planes[:1], planes[1:]

    def two(planes: Any) -> Any:
        return planes[:2], planes[2:]

    return one if planes[0].dtype == types.float32 else two


def _sum(planes: Any, place: Any, start: Any, stop: Any, first_words: Any, totals: Any) -> None:
    """Add elements `[start, stop)` of `planes` to the checksums; `place` is the number of the first of these planes."""


@overload(_sum, jit_options=JIT_OPTIONS)  # type: ignore[untyped-decorator]
def _sum_typed(planes: Any, place: Any, start: Any, stop: Any, first_words: Any, totals: Any) -> Any:
    def none(planes: Any, place: Any, start: Any, stop: Any, first_words: Any, totals: Any) -> Any:
        return None

    def some(planes: Any, place: Any, start: Any, stop: Any, first_words: Any, totals: Any) -> Any:
        words = planes[0][start:stop].view(np.uint64)
        of = min(place, 1)
        totals[of] = add_words(words, first_words[place] + start * planes[0].itemsize // 8, totals[of])
        _sum(planes[1:], place + 1, start, stop, first_words, totals)

    return some if len(planes) else none
