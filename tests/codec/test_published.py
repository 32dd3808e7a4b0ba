"""The codes that models are published in: each under the contract of codes, beside a decoder written from its description, and
beside transformers' own where that can be run here.

Run: pytest tests/codec/test_published.py
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.codec import Codec, Parts
from headrace.codec.published import Fp4Blocks, Fp8Blocks, Int8Rows, IntGroups, Mxfp4, Nf4, PackQuantized
from headrace.testing.codec_contract import CodecContract


def nibbles(packed: NDArray[Any]) -> NDArray[np.int64]:
    """Both halves of each byte, the lower one first, along a new last axis."""
    return np.stack([packed & 15, packed >> 4], axis=-1).astype(np.int64)


class PackedReference(CodecContract):
    error = 0.45  # of the largest, where that is clipped

    def reference(self, parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
        codes = nibbles(parts["weight_packed"].numpy().view(np.uint8)).reshape(rows, -1)[:, :columns]
        scales = parts["weight_scale"]
        zeros = np.full(scales.shape, 8)
        if "weight_zero_point" in parts:
            words = parts["weight_zero_point"].numpy().view(np.uint32)
            zeros = np.stack([(words[row // 8] >> np.uint32(4 * (row % 8))) & 15 for row in range(rows)]).astype(np.int64)
        group = columns // scales.shape[1]
        exact = (codes - np.repeat(zeros, group, axis=1)) * np.repeat(scales.double().numpy(), group, axis=1)
        return torch.from_numpy(exact).to(scales.dtype).double().numpy()  # numbers of at most 12 digits: rounded once


class TestPackQuantized(PackedReference):
    codec: Codec = PackQuantized(32)


@pytest.mark.parametrize("symmetric", [True, False])
def test_several_cores_decode_the_same(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, rows, columns = PackQuantized(32, symmetric=symmetric), 41, 64
    parts = codec.encode(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16())
    alone, together = torch.empty(2, rows - 3, columns, dtype=torch.bfloat16)
    codec.decode(parts, alone, range(3, rows))
    monkeypatch.setattr("headrace.codec.row_pieces._LEAST_WEIGHTS", 64)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    codec.decode(parts, together, range(3, rows))
    assert torch.equal(alone, together)


class TestPackQuantizedRows(PackedReference):
    codec = PackQuantized(0, "float32")


class TestPackQuantizedZeroPoints(PackedReference):
    codec = PackQuantized(64, "float16", symmetric=False)

    def test_zero_points_are_those_of_their_rows(self) -> None:
        codec = PackQuantized(64, "bfloat16", symmetric=False)
        parts = dict(codec.encode(self.weights(19, 128)))
        generator = torch.Generator().manual_seed(1)
        parts["weight_zero_point"] = torch.randint(-(2**31), 2**31, (3, 2), generator=generator).to(torch.int32)
        expected = torch.from_numpy(self.reference(parts, 19, 128)).to(torch.bfloat16)
        into = torch.empty(7, 128, dtype=torch.bfloat16)
        codec.decode(parts, into, range(9, 16))
        assert torch.equal(into, expected[9:16])


class TestFp8(CodecContract):
    codec = Fp8Blocks(16, 64)
    error = 1.0  # of the largest of its row: a block has several

    def reference(self, parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
        bits = parts["weight"].view(torch.uint8).numpy().astype(np.int64)
        sign, exponent, digits = np.where(bits >> 7, -1.0, 1.0), (bits >> 3) & 15, bits & 7
        values = sign * np.where(exponent, (1 + digits / 8) * 2.0 ** (exponent - 7), digits / 8 * 2.0**-6)
        scales = parts["weight_scale_inv"].double().numpy()
        wide = np.repeat(np.repeat(scales, 16, axis=0)[:rows], 64, axis=1)[:, :columns]
        return (values.astype(np.float32) * wide.astype(np.float32)).astype(np.float64)


def fields(words: Tensor, bits: int) -> NDArray[np.int64]:
    """The numbers of `bits` in each word, the lowest first, along the last axis."""
    wide = words.numpy().view(np.uint32).astype(np.int64)
    return np.stack([(wide >> shift) & ((1 << bits) - 1) for shift in range(0, 32, bits)], axis=-1)


class IntReference(CodecContract):
    shapes = ((8, 128), (40, 256), (64, 64))
    error = 0.6  # of the largest of the row
    layout = "awq"
    bits = 4

    def reference(self, parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
        """Number by number, from where AutoAWQ and AutoGPTQ put them."""
        if self.layout == "packed":
            codes = fields(parts["weight_packed"], self.bits).reshape(rows, -1)[:, :columns]
            scales, zeros = parts["weight_scale"], np.full((rows, 1), 1 << (self.bits - 1))
        elif self.layout == "awq":
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            codes = np.empty((columns, rows // 8, 8), np.int64)
            points = np.empty((len(parts["scales"]), rows // 8, 8), np.int64)
            for place, row in enumerate(order):
                codes[:, :, row] = fields(parts["qweight"], 4)[:, :, place]
                points[:, :, row] = fields(parts["qzeros"], 4)[:, :, place]
            codes, scales, zeros = codes.reshape(columns, rows).T, parts["scales"].T, points.reshape(-1, rows).T
        else:
            codes = fields(parts["qweight"], self.bits).transpose(0, 2, 1).reshape(columns, rows).T
            zeros = fields(parts["qzeros"], self.bits).reshape(len(parts["scales"]), rows).T
            scales, zeros = parts["scales"].T, (zeros + (self.layout == "gptq")) % (1 << self.bits)
        order = next((parts[name].numpy() for name in ("g_idx", "weight_g_idx") if name in parts), None)
        if order is None:
            order = np.arange(columns) // (columns // scales.shape[1])
        wide = np.broadcast_to(zeros, scales.shape)[:, order]
        exact = (codes - wide) * scales.double().numpy()[:, order]
        return torch.from_numpy(exact).to(scales.dtype).double().numpy()

    def test_any_words_decode_to_what_they_stand_for(self) -> None:
        rows, columns, drawn = 24, 128, torch.Generator().manual_seed(3)
        parts = dict(self.codec.encode(self.weights(rows, columns)))
        for name in parts:
            if parts[name].dtype is torch.int32 and "idx" not in name:
                parts[name] = torch.randint(-(2**31), 2**31, parts[name].shape, generator=drawn).int()
        if "g_idx" in parts:
            parts["g_idx"] = parts["g_idx"][torch.randperm(columns, generator=drawn)]
        expected = torch.from_numpy(self.reference(parts, rows, columns))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert torch.equal(self.decoded(parts, rows, columns, dtype), expected.float().to(dtype)), dtype
        if (again := self.codec.repacked(parts)) is not None:
            code, packed = again
            found = torch.empty(rows, columns, dtype=torch.float16)
            code.decode(packed, found, range(rows))
            assert torch.equal(found, expected.half())
        else:
            assert self.bits == 8 or "ordered" in self.codec.name


class TestAwq(IntReference):
    codec = IntGroups("awq", 32)


class TestGptq(IntReference):
    layout, codec = "gptq", IntGroups("gptq", 64)


class TestGptqOfEightBits(IntReference):
    layout, bits, codec = "gptq", 8, IntGroups("gptq", 32, bits=8)


class TestGptqInTheOrderOfActivations(IntReference):
    layout, codec = "gptq_v2", IntGroups("gptq_v2", 32, ordered=True)


class TestEightBitsOfCompressedTensors(IntReference):
    layout, bits, codec = "packed", 8, IntGroups("packed", 64, "bfloat16", 8, symmetric=True)


class Fp4Reference(CodecContract):
    shapes = ((1, 256), (3, 128), (40, 256))
    error = 1.0
    whole = ""

    def reference(self, parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        codes = nibbles(parts["weight_packed"].numpy()).reshape(rows, columns)
        scales = parts["weight_scale"].float().numpy()
        if self.whole:
            shared = parts[self.whole].numpy()
            scales = scales / shared if self.whole == "weight_global_scale" else scales * shared
        values = np.where(codes & 8, np.float32(-1), np.float32(1)) * table[codes & 7]
        return (values * np.repeat(scales, columns // scales.shape[1], axis=1)).astype(np.float64)


class TestNvfp4(Fp4Reference):
    whole, codec = "weight_global_scale", Fp4Blocks()


class TestNvfp4OfModelOpt(Fp4Reference):
    whole, codec = "weight_scale_2", Fp4Blocks(whole="weight_scale_2")


class TestFp4OfExperts(Fp4Reference):
    codec = Fp4Blocks(32, "float8_e8m0fnu", "")


class TestInt8Rows(CodecContract):
    codec = Int8Rows()
    error = 0.01

    def reference(self, parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
        """As bitsandbytes: two products in float32."""
        products = parts["weight"].numpy().astype(np.float32) * parts["SCB"].numpy()[:, None]
        return (products * np.float32(7.874015718698502e-3)).astype(np.float64)


class TestMxfp4(CodecContract):
    codec = Mxfp4(64)
    shapes = ((64, 8), (128, 5), (192, 16))
    error = 1.0

    def reference(self, parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = nibbles(parts["blocks"].numpy()).reshape(*parts["blocks"].shape[:3], 32)
        values = np.where(codes & 8, -1.0, 1.0) * table[codes & 7]
        values = values * 2.0 ** (parts["scales"].numpy().astype(np.float64) - 127)[..., None]
        return values.reshape(rows // 64, columns, 64).transpose(0, 2, 1).reshape(rows, columns)


class NfReference(CodecContract):
    error = 1.0

    def reference(self, parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
        codes = np.stack([parts["weight"].flatten().numpy() >> 4, parts["weight"].flatten().numpy() & 15], axis=-1).flatten()
        sizes = parts["absmax"].numpy()
        if "nested_absmax" in parts:
            blocks = np.arange(len(sizes)) // 256
            sizes = parts["nested_quant_map"].numpy()[sizes] * parts["nested_absmax"].numpy()[blocks]
            sizes = sizes + parts["nested_offset"].numpy()
        values = parts["quant_map"].numpy()[codes] * np.repeat(sizes, 64)[: len(codes)]
        return torch.from_numpy(values).to(torch.bfloat16).double().numpy().reshape(rows, columns)


class TestNf4(NfReference):
    codec = Nf4()


class TestNf4SingleSizes(NfReference):
    codec = Nf4(nested=False)


def random_bytes(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(4))


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = random_bytes((3, 10, 2, 16)), random_bytes((3, 10, 2)) // 8 + 110
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    into = torch.empty(3 * 64, 10, dtype=torch.bfloat16)
    Mxfp4(64).decode({"blocks": blocks, "scales": scales}, into, range(3 * 64))
    assert torch.equal(into.view(3, 64, 10), expected)


@pytest.mark.parametrize("shape", [(256, 384), (128, 256)])
def test_fp8_is_what_transformers_makes_of_it(shape: tuple[int, int]) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    scales = torch.rand(shape[0] // 128, shape[1] // 128, generator=torch.Generator().manual_seed(3)) * 0.01
    expected = dequantised(Fp8Dequantize, codes, scales)
    into = torch.empty(shape, dtype=torch.bfloat16)
    Fp8Blocks().decode({"weight": codes, "weight_scale_inv": scales}, into, range(shape[0]))
    assert torch.equal(into, expected.to(torch.bfloat16))


def dequantised(operation: Callable[..., Any], codes: Tensor, scales: Tensor) -> Tensor:
    """Run transformers' operation on one tensor."""
    found: Tensor = operation(None)._dequantize_one(codes, scales, torch.bfloat16)
    return found
