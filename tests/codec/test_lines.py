"""Loops of published codes: the bits of torch operations, whatever parts hold; products near those of float64.

Run: pytest tests/codec/test_lines.py
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codec import Codec, Parts
from headrace.codec.published import Fp8Blocks, GgufBlocks, Mxfp4, Nf4, PackQuantized, lines
from headrace.codec.published.gguf_blocks import RUNS

# With shapes whose lines end within a piece of a loop, and blocks of codes within a line.
CASES: tuple[tuple[Codec, int, int], ...] = (
    *((Fp8Blocks(32, 48, scales), 70, 2200) for scales in ("float32", "bfloat16", "float16", "float8_e8m0fnu")),
    *((PackQuantized(group, "float16", symmetric=group > 32), 21, 2240) for group in (32, 160, 0)),
    (PackQuantized(64, "bfloat16", symmetric=False), 9, 2112),
    *((Nf4(64, nested, 256, dtype), 33, 2078) for nested in (True, False) for dtype in ("bfloat16", "float16")),
    (Mxfp4(2304), 2 * 2304, 35),
    *((GgufBlocks(kind, ordered=kind == "Q8_0"), 7, 2560) for kind in RUNS),
)
PUBLISHED = pytest.mark.parametrize(("codec", "rows", "columns"), CASES, ids=[case[0].name for case in CASES])


def any_parts(codec: Codec, rows: int, columns: int, seed: int) -> Parts:
    """Return parts of any bits, but for the order of rows: each code value, and scales that are NaN, infinite or subnormal."""
    random, parts = np.random.default_rng(seed), {}
    for place in codec.places(rows, columns):
        dtype = getattr(torch, place.dtype)
        raw = torch.from_numpy(random.integers(0, 256, place.num_bytes, np.uint8))
        parts[place.name] = raw.view(dtype).view(place.shape)
    if "order" in parts:
        parts["order"] = torch.from_numpy(random.permutation(rows).astype(np.int32))
    return parts


def dtype_of(codec: Codec, seed: int) -> torch.dtype:
    """Return the dtype of decoded weights: that of scales, or any of two."""
    own = codec.scales if isinstance(codec, PackQuantized) else getattr(codec, "dtype", "")
    return getattr(torch, own or ("bfloat16", "float16")[seed % 2])


def decoded(
    codec: Codec, parts: Parts, columns: int, rows: range, dtype: torch.dtype, least: int, threads: int
) -> torch.Tensor:
    into = torch.empty(len(rows), columns, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_LEAST_DECODED", least)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        patch.setattr("headrace.codec.row_pieces._LEAST_WEIGHTS", 1)
        codec.decode(parts, into, rows)
    return into


@PUBLISHED
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 30), data=st.data())
def test_loops_have_the_bits_of_torch(codec: Codec, rows: int, columns: int, seed: int, data: Any) -> None:
    parts, dtype = any_parts(codec, rows, columns, seed), dtype_of(codec, seed)
    start = data.draw(st.integers(0, rows - 1))
    some = range(start, data.draw(st.integers(start + 1, rows)))
    by_torch = decoded(codec, parts, columns, some, dtype, 1 << 40, 1)
    by_loop = decoded(codec, parts, columns, some, dtype, 0, data.draw(st.sampled_from([1, 3])))
    numbers = ~by_torch.isnan()
    assert torch.equal(by_loop.isnan(), ~numbers)
    assert torch.equal(by_loop.view(torch.int16)[numbers], by_torch.view(torch.int16)[numbers])


@PUBLISHED
def test_a_product_is_that_of_float64_within_roundings_for_any_number_of_threads(
    codec: Any, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"scales", "weight_scale", "weight_scale_inv", "absmax", "nested_absmax", "nested_offset", "quant_map", "blocks"}
    parts = dict(any_parts(codec, rows, columns, 3))
    for name in usual & set(parts):  # numbers of which sums are finite
        if parts[name].is_floating_point():
            parts[name] = (torch.rand(parts[name].shape) + 0.5).to(parts[name].dtype)
        elif name == "scales":
            parts[name] = parts[name] % 8 + 120
    if "nested_quant_map" in parts:
        parts["nested_quant_map"] = torch.rand(256)
    if isinstance(codec, Fp8Blocks):
        parts["weight"] = parts["weight"].float().nan_to_num(1.0).to(torch.float8_e4m3fn)
    if isinstance(codec, GgufBlocks):  # scales of float16 are somewhere in blocks
        parts["blocks"] = parts["blocks"] & 0x3B
    dense = torch.empty(rows, columns, dtype=torch.float32)
    codec.decode(parts, dense, range(rows))
    weights = dense.view(-1, codec.inputs, columns).mT.flatten(0, 1) if isinstance(codec, Mxfp4) else dense
    found = codec.lines(parts, columns)
    assert (found.count, found.columns) == weights.shape
    few = torch.randn(8, found.columns, generator=torch.Generator().manual_seed(0))
    eight = found.times(few)
    exact, terms = few.double() @ weights.double().T, few.double().abs() @ weights.double().abs().T
    # Decoded weights may be rounded to 8 digits (`rounded`), sums are of float32.
    bound = (2**-24 * found.columns + (2**-8 if found.rounded else 0)) * terms
    assert bool(((eight.double() - exact).abs() <= bound).all())
    assert bool(exact.isfinite().all() and (exact != 0).any())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(lines, "_LEAST_WEIGHTS", 1)
    assert torch.equal(found.times(few), eight)
    assert torch.equal(found.times(few[2:3].contiguous()), eight[2:3]), "a row's sums do not depend on others"
