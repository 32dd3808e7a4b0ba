"""The Triton kernels beside the host's decoder: cases for a GPU, and for Triton's interpreter.

That must be asked for before Triton is imported, so in a process of its own: `python kernel_cases.py interpret` runs the cases,
`python kernel_cases.py compile` makes machine code for three kinds of GPU without having one.
"""

import importlib
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from headrace.codec import bf16x12, on_device
from headrace.codec.bf16x12 import Bf16x12
from headrace.codec.dictionary import Dictionary
from headrace.codec.published import PackQuantized
from headrace.codec.ternary import WordsCodec
from headrace.terms.errors import ModelError
from headrace.update.projectors import sparse

ARCHITECTURES = (80, 89, 90)
# Rows, columns, and the share of zeros: odd widths, one column, rows that are longer than a chunk of words.
SHAPES = ((1, 1, 0.5), (2, 2, 0.9), (3, 129, 0.885), (5, 641, 0.0), (64, 65, 0.885), (2, 4096, 0.95), (7, 300, 0.3))


@cache
def codec() -> WordsCodec:
    return WordsCodec(Dictionary.build())


def matrices() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Symbols and levels: drawn ones, rows of zeros alone, and rows of the largest level alone."""
    found = []
    for seed, (rows, columns, zeros) in enumerate(SHAPES):
        drawn = np.random.default_rng(seed).random((rows, columns))
        symbols = torch.from_numpy(np.where(drawn < zeros, 0, np.where(drawn < (1 + zeros) / 2, 1, 2)).astype(np.uint8))
        levels = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed)).bfloat16()
        found.append((symbols, levels))
    levels = torch.tensor([[-0.5, 0.25]] * 4).bfloat16()
    found.append((torch.zeros(4, 301, dtype=torch.uint8), levels))
    found.append((torch.full((4, 301), 2, dtype=torch.uint8), levels))
    return found


def moved(parts: Any, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: part.to(device) for name, part in parts.items()}


def words_have_the_bits_of_the_host(kernels: Any, device: torch.device) -> None:
    for symbols, levels in matrices():
        parts, (rows, columns) = codec().encode_symbols(symbols, levels), symbols.shape
        there = moved(parts, device)
        for dtype in (torch.bfloat16, torch.float32):
            expected = torch.empty(rows, columns, dtype=dtype)
            codec().decode(parts, expected, range(rows))
            for start, stop in ((0, rows), (rows // 2, rows), (1, 1)):
                room = torch.full(((stop - start) * columns + 64,), 7.0, dtype=dtype, device=device)
                into = room[32 : len(room) - 32].view(stop - start, columns)
                on_device.words_to_dense(kernels, codec().dictionary, there, into, range(start, stop))
                assert bits(into).equal(bits(expected[start:stop])), (rows, columns, dtype, start, stop)
                assert bool((room[:32] == 7).all() and (room[-32:] == 7).all())


def four_bits_have_the_bits_of_the_host(kernels: Any, device: torch.device) -> None:
    for rows, columns, group, symmetric in ((1, 8, 8, True), (9, 128, 32, False), (64, 1028, 4, True), (5, 96, 0, False)):
        code = PackQuantized(group, "bfloat16", symmetric)
        parts = dict(code.encode(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()))
        parts["weight_packed"] = torch.randint(-(2**31), 2**31, parts["weight_packed"].shape).int()  # any codes
        if not symmetric:
            parts["weight_zero_point"] = torch.randint(-(2**31), 2**31, parts["weight_zero_point"].shape).int()
        expected = torch.empty(rows, columns, dtype=torch.bfloat16)
        code.decode(parts, expected, range(rows))
        there = moved(parts, device)
        for start, stop in ((0, rows), (rows // 2, rows)):
            into = torch.full((stop - start, columns), 7.0, dtype=torch.bfloat16, device=device)
            zeros = there.get("weight_zero_point")
            on_device.int4_to_bfloat16(kernels, there["weight_packed"], there["weight_scale"], zeros, into, range(start, stop))
            assert bits(into).equal(bits(expected[start:stop])), (rows, columns, group, start)


def twelve_bits_have_the_bits_of_the_host(kernels: Any, device: torch.device) -> None:
    """Any bits, so that most weights escape, and rows like a model's; odd widths, one column, more escapes than a block."""
    code = Bf16x12()
    for seed, (rows, columns) in enumerate(((1, 1), (3, 129), (64, 65), (2, 4097), (17, 640))):
        drawn = np.random.default_rng(seed).integers(-(2**15), 2**15, (rows, columns)).astype(np.int16)
        like = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()
        for weights in (torch.from_numpy(drawn).view(torch.bfloat16), like):
            parts = dict(code.encode(weights))
            there = moved(parts, device)
            for start, stop in ((0, rows), (rows // 2, rows)):
                room = torch.full(((stop - start) * columns + 64,), 7.0, dtype=torch.bfloat16, device=device)
                into = room[32 : len(room) - 32].view(stop - start, columns)
                assert bf16x12.by_kernels(kernels, there, into, range(start, stop)) is None
                assert bits(into).equal(bits(weights[start:stop])), (rows, columns, start)
                assert bool((room[:32] == 7).all() and (room[-32:] == 7).all())
            for name, place, value in (("bases", -1, 241), ("escape_offsets", -1, -1), ("escape_offsets", -1, 10**9)):
                damaged = dict(parts, **{name: parts[name].clone()})
                damaged[name][place] = value
                into = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
                assert bf16x12.by_kernels(kernels, moved(damaged, device), into, range(rows)) == rows - 1
    for escapes in ([-1, 0], [1 << 30, 0], [5, 5, 0], [9, 5, 0]):
        damaged = dict(code.encode(torch.zeros(1, 7).bfloat16()), escapes=torch.tensor(escapes, dtype=torch.int32))
        damaged["escape_offsets"] = torch.tensor([0, len(escapes) - 1], dtype=torch.int32)
        into = torch.empty(1, 7, dtype=torch.bfloat16, device=device)
        assert bf16x12.by_kernels(kernels, moved(damaged, device), into, range(1)) == 0, escapes


def damage_is_refused(kernels: Any, device: torch.device) -> None:
    symbols, levels = matrices()[4]
    parts, (rows, columns) = codec().encode_symbols(symbols, levels), symbols.shape
    damaged = []
    for place, value in ((3, -1), (1, 10**9), (5, 0)):
        damaged.append(dict(parts, row_offsets=parts["row_offsets"].index_fill(0, torch.tensor([place]), value)))
    damaged.append(dict(parts, codes=torch.full_like(parts["codes"].view(torch.int16), 12).view(torch.uint16)))
    for each in damaged:
        there, into = moved(each, device), torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        with pytest.raises(ModelError, match="is damaged"):
            on_device.words_to_dense(kernels, codec().dictionary, there, into, range(rows))


def sparse_products_are_within_their_bound(kernels: Any, device: torch.device) -> None:
    """Rows without a non-zero, one column, more columns than a program has, repeated positions; the same bits when repeated."""
    del kernels  # those of codes
    own = importlib.import_module("headrace.update.projectors.triton_kernels")
    for seed, (rows, columns, width, most) in enumerate(((1, 1, 1, 1), (7, 5, 300, 4), (33, 64, 257, 9), (4, 9, 0, 2))):
        drawn = torch.Generator().manual_seed(seed)
        begins = torch.nn.functional.pad(torch.randint(0, most + 1, (rows,), generator=drawn).cumsum(0), (1, 0))
        places = torch.randint(0, columns, (int(begins[-1]),), generator=drawn)
        values, dense = torch.randn(len(places), generator=drawn), torch.randn(columns, width, generator=drawn)
        there = sparse.Csr(values.to(device), places.to(device), begins.to(device))
        found = sparse.by_kernel(own, there, dense.to(device))
        assert found.equal(sparse.by_kernel(own, there, dense.to(device)))
        whole, sizes = (
            torch.zeros(rows, columns, dtype=torch.float64).index_put(
                (torch.repeat_interleave(torch.arange(rows), begins.diff()), places), numbers.double(), accumulate=True
            )
            for numbers in (values, values.abs())
        )
        bound = (most + 2) * 2.0**-24 * (sizes @ dense.double().abs())
        assert bool(((found.cpu().double() - whole @ dense.double()).abs() <= bound).all()), (rows, columns, width)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


CASES = (
    words_have_the_bits_of_the_host,
    four_bits_have_the_bits_of_the_host,
    twelve_bits_have_the_bits_of_the_host,
    damage_is_refused,
    sparse_products_are_within_their_bound,
)


def compile_for(architecture: int) -> dict[str, int]:
    """Return the bytes of machine code of each kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernels = importlib.import_module("headrace.codec.triton_kernels")
    products_of = importlib.import_module("headrace.update.projectors.triton_kernels")
    words = {"codes": "*i16", "row_offsets": "*i32", "table": "*i32", "levels": "*bf16"}
    whole = {"damaged": "*i32", "num_words": "i32"}
    int4 = {"words": "*i32", "scales": "*bf16", "zeros": "*i32", "out": "*i16"}
    sizes = dict.fromkeys(("first", "columns", "words_of_row", "groups"), "i32")
    versions: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
        (kernels.words_to_dense, words | {"out": "*bf16"} | whole | {"first": "i32", "columns": "i32"}, {"chunk": 64}),
        (kernels.int4_to_bfloat16, int4 | sizes, {"has_zeros": True, "block": 128}),
        (kernels.int4_to_bfloat16, int4 | sizes, {"has_zeros": False, "block": 128}),
    ]
    twelve = {"low": "*u8", "bases": "*u8", "out": "*i16", "first": "i32", "columns": "i32"}
    listed = {"escape_offsets": "*i32", "escapes": "*i32", "damaged": "*i32", "known": "i32"}
    versions += [
        (kernels.bf16x12_codes, twelve | {"high": "*u8", "half": "i32"}, {"block": 256}),
        (kernels.bf16x12_escapes, twelve | listed, {"largest": 240, "block": 256}),
    ]
    csr = {"values": "*fp32", "columns": "*i64", "begins": "*i64", "dense": "*fp32", "out": "*fp32", "width": "i32"}
    versions.append((products_of.csr_times_dense, csr, {"block": 256}))
    found = {}
    for kernel, signature, constants in versions:
        source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
        made = compile(source, target=GPUTarget("cuda", architecture, 32))
        found[f"{kernel.fn.__name__} {constants}"] = len(made.asm["cubin"])
        assert "tt.dot" not in made.asm["ttir"]
    return found


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        for architecture in ARCHITECTURES:
            print(architecture, compile_for(architecture))
    else:
        for case in CASES:
            case(importlib.import_module("headrace.codec.triton_kernels"), torch.device("cpu"))
            print(case.__name__, flush=True)
