"""`bf16x12`: every pattern of bfloat16 comes back, on host and device, whatever it stands beside; damage is refused."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from headrace.codec import Parts
from headrace.codec.bf16x12 import Bf16x12, decode_in_torch
from headrace.codec.targets import Bf16x12Target
from headrace.terms.errors import ModelError
from headrace.testing.codec_contract import CodecContract

CODEC = Bf16x12()


def by_hand(parts: Parts, rows: int, columns: int) -> NDArray[np.uint16]:
    """Return the bits that parts stand for, weight by weight as the format's page says."""
    out, half = np.zeros((rows, columns), np.uint16), -(-columns // 2)
    low, high, bases = (parts[name].tolist() for name in ("low", "high", "bases"))
    offsets, escapes = parts["escape_offsets"].tolist(), parts["escapes"].tolist()
    for row in range(rows):
        fields = [high[row][column] & 15 if column < half else high[row][column - half] >> 4 for column in range(columns)]
        fields = [code and code + bases[row] for code in fields]
        for escape in escapes[offsets[row] : offsets[row + 1]]:
            fields[escape // 256] = escape % 256
        for column, (byte, field) in enumerate(zip(low[row], fields, strict=True)):
            out[row, column] = (byte >> 7) << 15 | field << 7 | (byte & 127)
    return out


def decoded(parts: Parts, rows: int, columns: int) -> NDArray[np.uint16]:
    into = torch.empty(rows, columns, dtype=torch.bfloat16)
    CODEC.decode(parts, into, range(rows))
    return into.view(torch.int16).numpy().view(np.uint16)


def of(bits: NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def damaged_row(parts: Parts, into: torch.Tensor) -> int | None:
    """Return the row that decoding refuses in one line, None if it refuses none."""
    try:
        CODEC.decode(parts, into, range(len(into)))
    except ModelError as error:
        said = re.fullmatch(r"bf16x12: row (\d+) of \d+ is damaged: .*", str(error))
        return int(said[1]) if said else -1
    return None


class TestBf16x12(CodecContract):
    codec = CODEC
    shapes = ((1, 256), (1, 1), (3, 2), (17, 129), (40, 256), (2, 4097))
    error = 0.0

    def reference(self, parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
        return of(by_hand(parts, rows, columns)).double().numpy()

    def damaged(self, parts: Parts) -> Iterator[Parts]:
        """A base too large, offsets that go back or beyond, columns beyond the row or twice, parts of another size."""
        for name, place, value in (
            ("bases", 0, 241),
            ("escape_offsets", -1, -1),
            ("escape_offsets", -1, 10**9),
            ("escape_offsets", 0, 1 << 20),
        ):
            changed = parts[name].clone()
            changed[place] = value
            yield dict(parts) | {name: changed}
        rows = len(parts["low"])
        for escapes in ([-1, 0], [1 << 30, 0], [5, 5, 0]):
            offsets = torch.tensor([0] + [len(escapes) - 1] * rows, dtype=torch.int32)
            yield dict(parts) | {"escapes": torch.tensor(escapes, dtype=torch.int32), "escape_offsets": offsets}
        for name in ("low", "high", "bases", "escape_offsets", "escapes"):
            yield dict(parts) | {name: parts[name][:0]}


# Any bits at all: most fields escape; and rows as models have them, with a few others.
SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 40))
ANY = SHAPES.flatmap(lambda shape: arrays(np.uint16, shape, elements=st.integers(0, 0xFFFF)))


@given(ANY)
@example(np.full((2, 7), 0x0001, np.uint16))
@example(np.full((3, 4), 0x8000, np.uint16))
@example(np.array([[0x7F81, 0xFFFF, 0x7F80, 0x3F80]], np.uint16))
def test_any_bits_come_back_on_host_and_device(bits: NDArray[np.uint16]) -> None:
    rows, columns = bits.shape
    parts = CODEC.encode(of(bits))
    assert np.array_equal(decoded(parts, rows, columns), bits)
    assert np.array_equal(by_hand(parts, rows, columns), bits)
    into = torch.empty(rows, columns, dtype=torch.bfloat16)
    assert decode_in_torch(parts, into, range(rows)) is None
    assert torch.equal(into.view(torch.int16), of(bits).view(torch.int16))
    wide = torch.empty(rows, columns, dtype=torch.float32)
    CODEC.decode(parts, wide, range(rows))
    assert np.array_equal(wide.view(torch.int32).numpy().view(np.uint32), bits.astype(np.uint32) << 16)


@given(ANY, st.data())
def test_a_changed_byte_decodes_or_is_refused(bits: NDArray[np.uint16], data: st.DataObject) -> None:
    """Alike on host and device; nothing beside the rows is written."""
    rows, columns = bits.shape
    parts = {name: part.clone() for name, part in CODEC.encode(of(bits)).items()}
    flat = parts[data.draw(st.sampled_from(sorted(parts)))].view(-1).view(torch.uint8)
    flat[data.draw(st.integers(0, len(flat) - 1))] = data.draw(st.integers(0, 255))
    room = torch.full(((rows + 2) * columns,), 7.0, dtype=torch.bfloat16)
    into = room[columns:-columns].view(rows, columns)
    found = damaged_row(parts, into)
    assert bool((room[:columns] == 7).all() and (room[-columns:] == 7).all())
    other = torch.empty(rows, columns, dtype=torch.bfloat16)
    there = decode_in_torch(parts, other, range(rows))
    assert there == found
    if found is None:
        assert torch.equal(other.view(torch.int16), into.view(torch.int16))


def test_several_cores_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that go to threads, and damage in a later one."""
    monkeypatch.setattr("headrace.codec.row_pieces._LEAST_WEIGHTS", 64)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    bits = np.random.default_rng(0).integers(0, 1 << 16, (41, 33), np.uint16)
    parts = dict(CODEC.encode(of(bits)))
    assert np.array_equal(decoded(parts, 41, 33), bits)
    parts["bases"] = parts["bases"].clone()
    parts["bases"][[17, 39]] = 250
    with pytest.raises(ModelError, match="row 17 of 41 is damaged"):
        decoded(parts, 41, 33)


def test_weights_of_a_model_take_twelve_bits() -> None:
    """Of a normal distribution one weight in 4096 has another exponent than those that have codes."""
    weights = (torch.randn(512, 4096, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    parts = CODEC.encode(weights)
    assert 8 * sum(part.nbytes for part in parts.values()) / weights.numel() < 12.03


def test_weights_of_another_dtype_are_rounded() -> None:
    weights = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(decoded(CODEC.encode(weights), 5, 9), weights.bfloat16().view(torch.int16).numpy().view(np.uint16))


def test_what_it_takes() -> None:
    target = Bf16x12Target()
    for shape, taken in (((8, 8), True), ((4, 8, 8), True), ((8,), False), ((2, 2, 2, 2), False), ((0, 8), False)):
        assert target.takes(shape, torch.bfloat16) is taken, shape
    assert not target.takes((8, 8), torch.float32)
    assert not CODEC.takes(1, 1 << 23)
    assert not CODEC.takes(1 << 21, 1 << 10)
