"""Blocks of GGUF: the package's own decoder, bit for bit, for any bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codec.published import GgufBlocks
from headrace.codec.published.gguf_blocks import BLOCKS
from headrace.terms.errors import ModelError
from headrace.testing.codec_contract import CodecContract

gguf = pytest.importorskip("gguf")


def decoded(blocks: np.ndarray, kind: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(BLOCKS)), st.integers(0, 10_000), st.integers(1, 4), st.booleans())
def test_any_bytes_decode_as_by_the_package(kind: str, seed: int, rows: int, ordered: bool) -> None:
    drawn, block = np.random.default_rng(seed), BLOCKS[kind]
    blocks = drawn.integers(0, 256, (rows, 2 * block.num_bytes), np.uint8)
    order = drawn.permutation(rows).astype(np.int32)
    codec = GgufBlocks(kind, ordered)
    parts = {"blocks": torch.from_numpy(blocks)} | ({"order": torch.from_numpy(order)} if ordered else {})
    expected = decoded(blocks[order] if ordered else blocks, kind)
    into = torch.empty(rows, 2 * block.numbers)
    codec.decode(parts, into, range(rows))
    assert np.array_equal(into.numpy(), expected, equal_nan=True)
    for part in codec.places(rows, 2 * block.numbers):
        assert parts[part.name].shape == part.shape


class _Contract(CodecContract):
    error = 0.2

    def reference(self, parts: dict[str, torch.Tensor], rows: int, columns: int) -> np.ndarray:
        return decoded(parts["blocks"].numpy(), self.codec.kind).astype(np.float64)


class TestQ8(_Contract):
    codec = GgufBlocks("Q8_0")


class TestQ4(_Contract):
    codec = GgufBlocks("Q4_0", ordered=True)


def test_eight_bits_are_written_as_by_the_package() -> None:
    weights = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    weights[3] = 0
    weights[4, :32] = torch.arange(-16, 16) * 0.5
    expected = gguf.quants.quantize(weights.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(GgufBlocks("Q8_0").encode(weights)["blocks"].numpy(), expected)


def test_a_type_that_is_only_read_says_so() -> None:
    with pytest.raises(ModelError, match="only read"):
        GgufBlocks("Q4_K").encode(torch.zeros(1, 256))
