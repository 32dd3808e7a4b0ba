"""MARLIN's order of codes beside its reference vectors, and the numbers that its kernel makes of them."""

import hashlib

import numpy as np

from headrace.codec.marlin import pack, permutation, unpack


def test_the_permutation_is_the_published_one() -> None:
    found = permutation()
    assert sorted(found.tolist()) == list(range(1024))
    assert found[:9].tolist() == [0, 128, 8, 136, 16, 144, 24, 152, 256]
    digest = hashlib.sha256(found.astype("<i4").tobytes()).hexdigest()
    assert digest == "4a976ee0bbf9e61fccbdfe65f788ec79b4d53f7c43cb14e00b06cca15c2d7784"


def test_packed_codes_come_back() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (128, 256), np.uint8)
    words = pack(codes)
    assert words.shape == (8, 512)
    assert np.array_equal(unpack(words), codes)
    assert words.view(np.uint32)[0, 0] & 15 == codes[0, 0]
    assert words.view(np.uint32)[0, 0] >> 4 & 15 == codes[8, 0], "place 1 of a chunk has code 128: row 8 of the first tile"


def test_the_kernels_masks_make_codes_less_eight() -> None:
    """Bits of float16: 0x6400 with a code in its last places is 1024 plus the code, or plus 16 times it."""
    for code in range(16):
        low = np.array(0x6400 | code, np.uint16).view(np.float16)
        high = np.array(0x6400 | code << 4, np.uint16).view(np.float16)
        assert low - np.array(0x6408, np.uint16).view(np.float16) == code - 8
        sixteenth, less = np.array([0x2C00, 0xD480], np.uint16).view(np.float16)
        assert float(high) * float(sixteenth) + float(less) == code - 8
