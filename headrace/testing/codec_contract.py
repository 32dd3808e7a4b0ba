"""The contract of a code as tests: subclass `CodecContract` in a test module, name the codec and write a slow decoder.

    class TestUpperByte(CodecContract):
        codec = UpperByte()

        def reference(self, parts, rows, columns):
            return ...  # float64 (rows, columns), by other means

Invariant: a code that passes gives the same bits however a matrix is cut into rows. It writes nowhere else, and takes no more
memory than it says. All values are drawn from fixed seeds.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.codec import Codec, Parts
from headrace.terms.errors import ModelError
from headrace.testing.rule_contract import StorageMeter

DTYPES = (torch.bfloat16, torch.float32)
_FILL = 7.0
# Of wider rows no 65,536 are made.
_MOST_COLUMNS = 300


class CodecContract:
    """What every code must satisfy. All `shapes` are tried that the codec takes. `error` bounds the rounding of a weight, as a
    share of the largest weight in its row; a lossless code has none.
    """

    codec: ClassVar[Codec]
    shapes: ClassVar[tuple[tuple[int, int], ...]] = ((1, 256), (3, 128), (40, 256), (17, 640))
    error: ClassVar[float] = 1.0

    def weights(self, rows: int, columns: int, seed: int = 0) -> Tensor:
        """Return a matrix like those of models, bfloat16."""
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(rows, columns, generator=generator, dtype=torch.float32) * 0.02).to(torch.bfloat16)

    def reference(self, parts: Parts, rows: int, columns: int) -> NDArray[np.float64]:
        """Return the values of `parts`, decoded by other means than the codec's."""
        raise NotImplementedError

    def damaged(self, parts: Parts) -> Iterator[Parts]:
        """Yield parts that must be refused; by default there are none."""
        yield from ()

    def _cases(self) -> Iterator[tuple[int, int, Tensor, Parts]]:
        for seed, (rows, columns) in enumerate(shape for shape in self.shapes if self.codec.takes(*shape)):
            weights = self.weights(rows, columns, seed)
            yield rows, columns, weights, self.codec.encode(weights)

    def test_it_takes_some_of_the_shapes(self) -> None:
        """And has a name."""
        assert any(self.codec.takes(*shape) for shape in self.shapes)
        assert self.codec.name

    def test_decoding_is_what_the_parts_stand_for(self) -> None:
        """Bit for bit in bfloat16 and in float32, each number rounded once; beside the weights, within the code's error."""
        for rows, columns, weights, parts in self._cases():
            expected = torch.from_numpy(self.reference(parts, rows, columns))
            for dtype in DTYPES:
                found = self.decoded(parts, rows, columns, dtype)
                assert torch.equal(found, expected.float().to(dtype)), f"{rows} x {columns}, {dtype}"
            largest = weights.double().abs().amax(dim=1, keepdim=True)
            assert bool(((expected - weights.double()).abs() <= self.error * largest).all()), f"{rows} x {columns}"

    def test_rows_are_decoded_independently_and_nothing_else_is_written(self) -> None:
        """Any range of rows, the empty one too, into a place between others."""
        for rows, columns, _, parts in self._cases():
            for dtype in DTYPES:
                whole = self.decoded(parts, rows, columns, dtype)
                for start, stop in {(0, 1), (rows - 1, rows), (rows // 3, rows // 3), (rows // 3, rows), (0, rows // 2 + 1)}:
                    room = torch.full(((stop - start) * columns + 256,), _FILL, dtype=dtype)
                    place = room[128 : 128 + (stop - start) * columns].view(stop - start, columns)
                    self.codec.decode(parts, place, range(start, stop))
                    assert torch.equal(place, whole[start:stop]), f"{rows} x {columns}, rows {start} to {stop}"
                    assert bool((room[:128] == _FILL).all() and (room[len(room) - 128 :] == _FILL).all())

    def test_parts_fit_their_places(self) -> None:
        """By name, dtype and bytes."""
        for rows, columns, _, parts in self._cases():
            places = {part.name: part for part in self.codec.places(rows, columns)}
            assert set(parts) == set(places)
            for name, tensor in parts.items():
                assert str(tensor.dtype) == f"torch.{places[name].dtype}", name
                assert tensor.element_size() == places[name].bytes_per_number, name
                assert tensor.numel() * tensor.element_size() <= places[name].num_bytes, name

    def test_encoding_again_changes_nothing_where_the_code_says_so(self) -> None:
        """The same parts, bit for bit."""
        if not self.codec.idempotent:
            return
        for rows, columns, _, parts in self._cases():
            again = self.codec.encode(self.decoded(parts, rows, columns, torch.bfloat16))
            assert all(torch.equal(parts[name], again[name]) for name in parts), f"{rows} x {columns}"

    def test_decoding_allocates_what_it_says(self) -> None:
        """Storages that torch operations make at once."""
        for rows, columns, _, parts in self._cases():
            into = torch.empty(rows, columns, dtype=torch.bfloat16)
            with StorageMeter([into, *parts.values()]) as storage:
                self.codec.decode(parts, into, range(rows))
            assert storage.peak_bytes <= self.codec.decoding_bytes(rows, columns), f"{rows} x {columns}"

    def test_what_is_no_number_is_refused_or_comes_back(self) -> None:
        """Refused with an error of the project's own; a lossless code keeps it, with its payload."""
        for rows, columns, weights, _ in self._cases():
            for bits in (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF):
                bad = weights.clone()
                bad.view(torch.int16)[rows // 2, columns // 2] = bits - (bits >> 15 << 16)
                if self.codec.lossless:
                    found = self.decoded(self.codec.encode(bad), rows, columns, torch.bfloat16)
                    assert torch.equal(found.view(torch.int16), bad.view(torch.int16)), f"{rows} x {columns}, {bits:#x}"
                else:
                    refused(lambda bad=bad: self.codec.encode(bad), f"a weight of {bits:#x}")

    def test_a_lossless_code_has_every_pattern_of_bfloat16(self) -> None:
        """All 65,536: each among weights like a model's, and all one after another."""
        if not self.codec.lossless:
            return
        patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        for columns in {columns for _, columns in self.shapes if columns <= _MOST_COLUMNS}:
            among = self.weights(1 << 16, columns).view(torch.int16)
            among[:, columns // 3] = patterns
            self._comes_back(among)
        for columns in (1, 255, 1 << 16):
            self._comes_back(patterns[: (1 << 16) // columns * columns].view(-1, columns))

    def _comes_back(self, bits: Tensor) -> None:
        rows, columns = bits.shape
        found = self.decoded(self.codec.encode(bits.view(torch.bfloat16)), rows, columns, torch.bfloat16)
        assert torch.equal(found.view(torch.int16), bits), f"{rows} x {columns}"

    def test_what_is_damaged_is_refused(self) -> None:
        """With an error of the project's own."""
        for rows, columns, _, parts in self._cases():
            for index, damaged in enumerate(self.damaged(parts)):
                refused(
                    lambda damaged=damaged, rows=rows, columns=columns: self.decoded(damaged, rows, columns, torch.bfloat16),
                    f"{rows} x {columns}, damage {index}",
                )

    def decoded(self, parts: Parts, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return a whole matrix."""
        into = torch.full((rows, columns), _FILL, dtype=dtype)
        self.codec.decode(parts, into, range(rows))
        return into


def refused(action: Any, what: str) -> None:
    """Raise AssertionError unless `action` raises ModelError."""
    try:
        action()
    except ModelError:
        return
    raise AssertionError(f"not refused: {what}")
