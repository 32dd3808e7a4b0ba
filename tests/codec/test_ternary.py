"""Ternary weights in words of a dictionary and in trits: published vectors, sizes, and any bits there and back."""

import hashlib
import itertools
import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.codec import Parts
from headrace.codec.dictionary import QMOE_DIGEST, Dictionary
from headrace.codec.ternary import TritsCodec, WordsCodec, parts_bytes, symbols_of
from headrace.terms.errors import ModelError
from headrace.testing.codec_contract import CodecContract
from headrace.testing.rule_contract import StorageMeter


@cache
def dictionary(zeros: int = 885) -> Dictionary:
    return Dictionary.build(zeros)


@cache
def sequences(zeros: int = 885) -> list[tuple[int, ...]]:
    """Each word's weights, from the table's bits one by one."""
    found = []
    for first, second in dictionary(zeros).words.tolist():
        weights = [word >> (4 + 2 * place) & 3 for word in (first, second) for place in range(14)]
        found.append(tuple(weights[: 2 * (first & 15)]))
    return found


def symbols(rows: int, columns: int, zeros: float, seed: int = 0) -> torch.Tensor:
    drawn = np.random.default_rng(seed).random((rows, columns))
    return torch.from_numpy(np.where(drawn < zeros, 0, np.where(drawn < (1 + zeros) / 2, 1, 2)).astype(np.uint8))


LEVELS = torch.tensor([[-0.03125, 0.0625]], dtype=torch.bfloat16)


def expanded(found: list[int], low: float, high: float) -> list[float]:
    return [(0.0, low, high)[symbol] for symbol in found]


class TestWords(CodecContract):
    codec = WordsCodec(dictionary())
    shapes = ((2, 2), (3, 129), (2, 256), (40, 256), (17, 641), (2, 3))
    error = 0.51

    def reference(self, parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
        """Word by word in Python."""
        offsets, out = parts["row_offsets"].tolist(), np.zeros((rows, columns))
        for row in range(rows):
            words = parts["codes"].tolist()[offsets[row] : offsets[row + 1]]
            found = list(itertools.chain.from_iterable(sequences()[word] for word in words))
            assert len(found) in (columns, columns + columns % 2)
            out[row] = expanded(found[:columns], *parts["levels"][row].double().tolist())
        return out

    def damaged(self, parts: Parts) -> Iterator[Parts]:
        """Words of another length, offsets that go back or beyond, a row too few."""
        longest = torch.full_like(parts["codes"].view(torch.int16), 12).view(torch.uint16)  # 13 pairs of zeros each
        yield dict(parts) | {"codes": longest} if parts["levels"].shape[0] > 2 else dict(parts) | {"codes": parts["codes"][:-1]}
        for change in ((0, -1), (1, 10**9), (-1, 0)):
            offsets = parts["row_offsets"].clone()
            offsets[change[0]] = change[1]
            yield dict(parts) | {"row_offsets": offsets}
        yield dict(parts) | {"row_offsets": parts["row_offsets"][:-1]}


class TestTrits(CodecContract):
    codec = TritsCodec()
    shapes = ((2, 2), (3, 129), (40, 256), (17, 641), (2, 5))
    error = 0.51

    def reference(self, parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
        """Digit by digit in Python."""
        out = np.zeros((rows, columns))
        for row, stored in enumerate(parts["trits"].tolist()):
            digits = [byte // 3**place % 3 for byte in stored for place in range(5)]
            out[row] = expanded(digits[:columns], *parts["levels"][row].double().tolist())
        return out

    def damaged(self, parts: Parts) -> Iterator[Parts]:
        """A byte that is no five digits; bytes of another width."""
        trits = parts["trits"].clone()
        trits[-1, -1] = 243
        yield dict(parts) | {"trits": trits}
        yield dict(parts) | {"trits": parts["trits"][:, :-1]}


def test_the_dictionary_is_the_published_one() -> None:
    found, pairs = dictionary(), np.array([len(each) // 2 for each in sequences()])
    assert found.digest == QMOE_DIGEST == hashlib.sha256(found.words.tobytes()).hexdigest()
    expected = [9, 65, 233, 577, 1161, 2049, 3305, 4993, 7177, 9921, 13289, 17345, 3843, 1569]
    assert np.bincount(pairs)[1:].tolist() == expected
    known = set(sequences())
    assert all(each[2:] in known and each[:-2] in known for each in sequences() if len(each) > 2)
    assert {each for each in sequences() if len(each) == 2} == set(itertools.product(range(3), repeat=2))
    assert [sequences()[word] for word in (0, 1)] == [(0, 0), (0, 0, 0, 0)]
    assert found.words[:3, 0].tolist() == [1, 2, 3]
    one = [0.885, (1 - 0.885) / 2, (1 - 0.885) / 2]
    assert math.prod(one[symbol] for symbol in sequences()[0]) == pytest.approx(0.783225, abs=1e-6)
    assert math.prod(one[symbol] for symbol in sequences()[-1]) == pytest.approx(1.1447186542801118e-05, rel=1e-9)


def test_a_dictionary_that_is_another_one_is_refused() -> None:
    found = dictionary()
    assert Dictionary.from_table(885, found.words.copy(), QMOE_DIGEST).lanes.tobytes() == found.lanes.tobytes()
    damaged = found.words.copy()
    damaged[1234, 1] ^= 1 << 9
    with pytest.raises(ModelError, match=r"has the digest .*, expected was c09862c453fe1226: it is damaged"):
        Dictionary.from_table(885, damaged, QMOE_DIGEST)
    with pytest.raises(ModelError, match=r"expected uint32 \(65536, 2\)"):
        Dictionary.from_table(885, damaged[:5], QMOE_DIGEST)
    damaged[:, 0] = 0
    with pytest.raises(ModelError, match="no length from 1 to 14 pairs"):
        Dictionary.from_table(885, damaged, hashlib.sha256(damaged.tobytes()).hexdigest())
    with pytest.raises(ModelError, match="give 1 to 999"):
        Dictionary.build(1000)


@given(st.integers(1, 90), st.integers(1, 12), st.sampled_from([0.0, 0.3, 0.9, 1.0]), st.integers(0, 2**32 - 1))
def test_any_symbols_come_back(columns: int, rows: int, zeros: float, seed: int) -> None:
    """Odd widths, rows of zeros alone, rows without any, a width of one."""
    drawn = symbols(rows, columns, zeros, seed)
    levels = LEVELS.repeat(rows, 1)
    expected = torch.where(drawn == 1, levels[:, :1], torch.where(drawn == 2, levels[:, 1:], 0))
    for codec in (WordsCodec(dictionary()), TritsCodec()):
        parts = codec.encode_symbols(drawn, levels)
        into = torch.full((rows, columns), 7, dtype=torch.bfloat16)
        codec.decode(parts, into, range(rows))
        assert torch.equal(into, expected)
        on_device = torch.full((rows, columns), 7, dtype=torch.bfloat16)
        codec._decode_on_device(parts, on_device, range(rows))
        assert torch.equal(on_device, expected)


def decode_as_on_a_device(codec: WordsCodec | TritsCodec, parts: Parts, into: torch.Tensor) -> None:
    codec._check(parts, into.shape[1])
    codec._decode_on_device(parts, into, range(len(into)))


def test_on_a_device_memory_is_what_was_said_and_damage_is_refused() -> None:
    """By the operations that a device runs where Triton does not work: here on the host. Long rows, and many short words."""
    for rows, columns, zeros in ((3, 20_001, 0.885), (40, 3000, 0.0), (300, 64, 0.9)):
        drawn = symbols(rows, columns, zeros)
        for codec in (WordsCodec(dictionary()), TritsCodec()):
            parts = codec.encode_symbols(drawn, LEVELS.repeat(rows, 1))
            into = torch.empty(rows, columns, dtype=torch.bfloat16)
            with StorageMeter([into, *parts.values()]) as storage:
                codec._decode_on_device(parts, into, range(rows))
            assert storage.peak_bytes <= codec.decoding_bytes(rows, columns, on_host=False)
    for contract in (TestWords(), TestTrits()):
        parts = contract.codec.encode(contract.weights(40, 256))
        for damaged in contract.damaged(parts):
            with pytest.raises(ModelError):
                decode_as_on_a_device(contract.codec, damaged, torch.empty(40, 256))


def test_the_greedy_parse_is_a_shortest_one() -> None:
    """Beside the least number of words by dynamic programming."""
    known = set(sequences())
    for seed in range(3):
        row = symbols(1, 600, 0.885, seed)
        found, weights = WordsCodec(dictionary()).encode_symbols(row, LEVELS)["codes"].numel(), tuple(row[0].tolist())
        least = [0] + [10**6] * 300
        for stop in range(1, 301):
            starts = range(max(0, stop - 14), stop)
            least[stop] = min(least[at] + 1 for at in starts if weights[2 * at : 2 * stop] in known)
        assert found == least[300]


def ratio(rows: int, columns: int, zeros: float = 0.885, table: int = 885) -> float:
    """Return bfloat16's bytes over those of the codes and 64 bits a row, from enough of the rows."""
    sample = max(16, 400_000 // columns)
    parts = WordsCodec(dictionary(table)).encode_symbols(symbols(sample, columns, zeros), LEVELS.repeat(sample, 1))
    assert parts_bytes(parts) == 2 * parts["codes"].numel() + 8 * sample + 4
    return 2 * columns / ((parts_bytes(parts) - 4) / sample)


def test_sizes_on_the_shapes_of_the_paper() -> None:
    """21.11 on both of c2048's matrices together is the paper's figure."""
    shapes = {(768, 3072): 21.11, (3072, 768): 19.33, (1024, 4096): 21.25, (4096, 1024): 19.90}
    shapes |= {(2080, 6144): 21.43, (6144, 2080): 20.80}
    for shape, expected in shapes.items():
        assert ratio(*shape) == pytest.approx(expected, rel=0.005), shape
    assert 2 / (1 / ratio(2080, 6144) + 1 / ratio(6144, 2080)) == pytest.approx(21.11, rel=0.005)


@pytest.mark.parametrize(
    ("zeros", "shipped", "rebuilt"), [(0.5, 2.941, 1.566), (0.7, 1.690, 1.253), (0.8, 1.121, 1.010), (0.93, 0.619, 0.619)]
)
def test_bits_by_the_share_of_zeros(zeros: float, shipped: float, rebuilt: float) -> None:
    """With the published dictionary and with one for that share; never below the entropy. Long rows, codes alone."""
    drawn = symbols(20, 20_000, zeros)
    for table, expected in ((885, shipped), (round(1000 * zeros), rebuilt)):
        parts = WordsCodec(Dictionary.build(table) if table != 885 else dictionary()).encode_symbols(
            drawn, LEVELS.repeat(20, 1)
        )
        bits = 16 * parts["codes"].numel() / drawn.numel()
        assert bits == pytest.approx(expected, rel=0.01)
        assert bits >= -zeros * math.log2(zeros) - (1 - zeros) * math.log2((1 - zeros) / 2) - 0.01


def test_a_row_without_negative_weights_keeps_its_compression() -> None:
    """QMoE's own packing takes the zeros of such a row for its least value."""
    weights = torch.where(symbols(8, 4096, 0.885) > 0, 0.5, 0.0).to(torch.bfloat16)
    parts = WordsCodec(dictionary()).encode(weights)
    assert parts["levels"].tolist() == [[0.0, 0.5]] * 8
    assert parts_bytes(parts) < 2 * weights.numel() / 18
    assert symbols_of(-weights)[0].max() == 1
    assert not symbols_of(torch.zeros(2, 5))[0].any()
