"""The Triton kernels beside the host's decoder: cases for a GPU, and for Triton's interpreter.

That must be asked for before Triton is imported, so in a process of its own: `python kernel_cases.py interpret` runs the cases,
`python kernel_cases.py compile 80 86` makes machine code for these kinds of GPU without having one. `bench/gpu_proof.py` runs
them on a GPU.
"""

import importlib
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.codec import bf16x12, on_device
from headrace.codec.bf16x12 import Bf16x12
from headrace.codec.codec import Codec
from headrace.codec.dictionary import Dictionary
from headrace.codec.published import Mxfp4, PackQuantized
from headrace.codec.ternary import WordsCodec
from headrace.model.kernels.device_products import DeviceMatrix, shape_of
from headrace.terms.errors import ModelError
from headrace.update.projectors import sparse

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


# Code, shape, rows: widths that end within a tile, splits, zero points, both dtypes of scales, experts of MXFP4.
PRODUCTS: tuple[tuple[Codec, tuple[int, int], int], ...] = (
    (PackQuantized(32), (80, 96), 1),
    (PackQuantized(128, "bfloat16", False), (136, 1024), 5),
    (PackQuantized(64, "float16", False), (72, 320), 17),
    (PackQuantized(0, "float16"), (64, 256), 64),
    (Mxfp4(96), (96, 70), 3),
)


def products_are_those_of_decoded_weights(kernels: Any, device: torch.device) -> None:
    del kernels  # those that decode into memory
    for seed, (code, shape, count) in enumerate(PRODUCTS):
        for dtype in (torch.bfloat16, torch.float16):
            product_case(code, shape, count, dtype, device, seed)


def product_case(code: Codec, sizes: tuple[int, int], count: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Any codes: decoded they have the host's bits; rows times them are within rounding of float64, and repeat bit for bit."""
    drawn = torch.Generator().manual_seed(seed)
    parts = dict(code.encode(torch.randn(sizes, generator=drawn).to(getattr(torch, getattr(code, "scales", "bfloat16")))))
    for name in parts.keys() & {"weight_packed", "weight_zero_point"}:
        parts[name] = torch.randint(-(2**31), 2**31, parts[name].shape, generator=drawn).int()
    if "blocks" in parts:
        parts["blocks"] = torch.randint(0, 256, parts["blocks"].shape, generator=drawn).to(torch.uint8)
    host = torch.empty(sizes, dtype=dtype)
    code.decode(parts, host, range(len(host)))
    shape = shape_of(code, *sizes)
    assert shape is not None
    matrix = DeviceMatrix(shape, moved(parts, device))
    assert matrix.num_bytes == shape.kept_bytes()
    by_input = isinstance(code, Mxfp4)
    for way in (True, False):
        into = torch.empty(sizes if way == by_input else sizes[::-1], dtype=dtype, device=device)
        matrix.decode(into, by_input=way)
        assert bits(into if way == by_input else into.T).equal(bits(host)), (code, sizes, way)
    rows = torch.randn(count, shape.inputs, generator=drawn).to(dtype)
    found = matrix.rows_times(rows.to(device))
    assert bits(found).equal(bits(matrix.rows_times(rows.to(device)))), (code, sizes)
    left, right = rows.double(), (host if by_input else host.T).double()
    exact, sums = left @ right, left.abs() @ right.abs()
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 2.0**-24 * (shape.inputs + 2) * sums + torch.finfo(dtype).tiny
    assert bool(((found.cpu().double() - exact).abs() <= bound).all()), (code, sizes, count, dtype)


def drawn_products(device: torch.device) -> None:
    """Shapes by hypothesis, small: the interpreter takes a second for a hundred thousand codes."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    groups = st.sampled_from([(32, 9), (64, 5), (128, 3), (256, 2)])

    @settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @given(
        groups, st.integers(1, 20), st.integers(1, 40), st.sampled_from(["bfloat16", "float16"]), st.booleans(), st.booleans()
    )
    def check(group: tuple[int, int], outputs: int, count: int, scales: str, symmetric: bool, wide: bool) -> None:
        code = PackQuantized(group[0], scales, symmetric)
        columns = group[0] * (1 + (outputs + count) % group[1])
        dtype = torch.bfloat16 if wide else torch.float16
        product_case(code, (8 * outputs, columns), count, dtype, device, outputs)
        product_case(Mxfp4(columns), (columns, 3 * outputs), count, dtype, device, count)

    check()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


CASES = (
    words_have_the_bits_of_the_host,
    four_bits_have_the_bits_of_the_host,
    twelve_bits_have_the_bits_of_the_host,
    damage_is_refused,
    sparse_products_are_within_their_bound,
    products_are_those_of_decoded_weights,
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
    found, products = {}, product_kernels()
    own = [kernel for kernel, _, _ in products]
    for kernel, signature, constants in versions + products:
        # As calls have them: what torch allocates, and widths, are multiples of 16.
        even = [name for name, kind in signature.items() if kind.startswith("*") or name in ("inputs", "outputs")]
        known = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in even} if kernel in own else {}
        source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, known)
        made = compile(source, target=GPUTarget("cuda", architecture, 32), options={"enable_fp_fusion": False})
        found[f"{kernel.fn.__name__} {constants}"] = len(made.asm["cubin"])
        assert ("tt.dot" in made.asm["ttir"]) == (kernel.fn.__name__ == "rows_times_coded")
        assert spilled(made.asm["ptx"]) == 0, (kernel.fn.__name__, constants)
    return found


def product_kernels() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Return the kernels of `triton_products` with the types and constants of what they are called with."""
    own = importlib.import_module("headrace.model.kernels.triton_products")
    found: list[tuple[Any, dict[str, str], dict[str, Any]]] = []
    for microscaled, zeros, scales, rows, group in (
        (False, False, "*i16", "*i16", 128),
        (False, True, "*i16", "*fp16", 32),
        (False, True, "*fp16", "*i16", 128),
        (True, False, "*u8", "*i16", 32),
    ):
        stored = {"words": "*i32", "scales": scales, "zeros": "*i32"}
        flags = {"group": group, "microscaled": microscaled, "has_zeros": zeros, "block_outputs": 64}
        flags |= {"bfloat_scales": scales == "*i16", "bfloat": rows == "*i16"}
        sizes = dict.fromkeys(("num_rows", "inputs", "outputs", "tiles_of_split"), "i32")
        for block in (16, 64):
            types = {"rows": rows, **stored, "partial": "*fp32", **sizes}
            found.append((own.rows_times_coded, types, flags | {"native": True, "block_rows": block}))
        types = {**stored, "out": rows, "inputs": "i32", "outputs": "i32"}
        found.append((own.coded_to_dense, types, flags | {"by_input": microscaled}))
    sums = {"partial": "*fp32", "out": "*i16", "numbers": "i32", "splits": "i32"}
    tiles = {"stored": "*i32", "words": "*i32", "outputs": "i32", "words_of_output": "i32"}
    found.append((own.words_in_tiles, tiles, {"block_outputs": 64}))
    return [*found, (own.sum_of_splits, sums, {"bfloat": True, "block": 256})]


def spilled(code: str) -> int:
    """Return the bytes that a kernel stores because registers do not suffice, as the assembler says."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assembler = next(path for name in ("ptxas-blackwell", "ptxas") if (path := folder / name).exists())  # the newer knows all
    target = re.search(r"^\.target (\w+)", code, re.MULTILINE)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(code)
        file.flush()
        command = [assembler, "-v", "--gpu-name", target[1], file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", said))


def run(device: torch.device) -> list[str]:
    """Run all cases on `device`: the host for the interpreter. Return their names."""
    for case in CASES:
        case(importlib.import_module("headrace.codec.triton_kernels"), device)
        print(case.__name__, flush=True)
    return [case.__name__ for case in CASES]


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        for architecture in map(int, sys.argv[2:]):
            print(architecture, compile_for(architecture), flush=True)
    elif sys.argv[1] == "drawn":
        drawn_products(torch.device("cpu"))
    else:
        run(torch.device("cpu"))
