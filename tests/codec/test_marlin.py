"""MARLIN's layout against the vectors of its reference, and what its kernels make of a word.

Run: pytest tests/codec/test_marlin.py
"""

import hashlib

import numpy as np
import pytest
import torch

from headrace.codec.int4 import pack, unpack
from headrace.codec.marlin import marlin, marlin_scales, permutation, unmarlin


def codes_of(inputs: int, outputs: int) -> torch.Tensor:
    return torch.randint(0, 16, (inputs, outputs), dtype=torch.uint8, generator=torch.Generator().manual_seed(inputs))


def test_the_permutation_is_the_reference() -> None:
    digest = hashlib.sha256(permutation().numpy().astype("<i4").tobytes()).hexdigest()
    assert digest == "4a976ee0bbf9e61fccbdfe65f788ec79b4d53f7c43cb14e00b06cca15c2d7784"
    assert permutation()[:9].tolist() == [0, 128, 8, 136, 16, 144, 24, 152, 256]
    assert sorted(permutation().tolist()) == list(range(1024))


@pytest.mark.parametrize("shape", [(16, 64), (128, 256), (48, 192)])
def test_codes_come_back(shape: tuple[int, int]) -> None:
    codes = codes_of(*shape)
    words = marlin(codes)
    assert words.dtype == torch.int32
    assert words.shape == (shape[0] // 16, 2 * shape[1])
    assert torch.equal(unmarlin(words), codes)


def test_a_word_holds_the_codes_that_the_permutation_names() -> None:
    """One number at a time: word w of a row of tiles has weights 8 w to 8 w + 7 of the shuffled tiles."""
    codes = codes_of(32, 128)
    words = marlin(codes).numpy().view(np.uint32)
    for row in range(2):
        tiles = [codes[16 * row : 16 * row + 16, 16 * tile : 16 * tile + 16].flatten() for tile in range(8)]
        flat = torch.cat(tiles)
        for word in (0, 1, 77, 255):
            chunk, first = divmod(8 * word, 1024)
            expected = [int(flat[1024 * chunk + int(permutation()[first + nibble])]) for nibble in range(8)]
            assert [(int(words[row, word]) >> 4 * nibble) & 15 for nibble in range(8)] == expected


def test_what_is_stored_becomes_the_layout_and_back() -> None:
    codes = codes_of(64, 128).T.contiguous()  # (outputs, inputs), as a matrix of a model lies
    assert torch.equal(unmarlin(marlin(unpack(pack(codes), 64).T.contiguous())).T, codes)


def test_two_bit_operations_widen_a_code() -> None:
    """The kernel's arithmetic in float16: 1024 + u less 1032, and (1024 + 16 u) / 16 less 72, are u - 8."""
    codes = np.arange(16, dtype=np.uint16)
    low = (codes | 0x6400).astype(np.uint16).view(np.float16) - np.uint16(0x6408).view(np.float16)
    high = ((codes << 4) | 0x6400).astype(np.uint16).view(np.float16).astype(np.float32)
    wide = high * np.float32(np.uint16(0x2C00).view(np.float16)) + np.float32(np.uint16(0xD480).view(np.float16))
    assert low.tolist() == wide.tolist() == list(range(-8, 8))


def test_scales_go_to_their_columns() -> None:
    grouped, single = torch.arange(256.0).view(2, 128), torch.arange(64.0)[None]
    assert marlin_scales(grouped)[0, :10].tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 1, 9]
    assert marlin_scales(grouped)[1, 64:67].tolist() == [192, 200, 208]
    assert marlin_scales(single)[0, :10].tolist() == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]
    assert sorted(marlin_scales(single)[0].tolist()) == list(range(64))
