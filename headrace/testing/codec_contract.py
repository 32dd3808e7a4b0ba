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


class CodecContract:
    """What every code must satisfy. All `shapes` are tried that the codec takes. `error` bounds the rounding of a weight, as a
    share of the largest weight in its row.
    """

    codec: ClassVar[Codec]
    shapes: ClassVar[tuple[tuple[int, int], ...]] = ((1, 256), (3, 128), (40, 256), (17, 640))
    error: ClassVar[float] = 1.0

    def weights(self, rows: int, columns: int, seed: int = 0) -> Tensor:
        """Return a matrix like those of models, bfloat16."""
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(rows, columns, generator=generator) * 0.02).to(torch.bfloat16)

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

    def test_what_is_no_number_and_what_is_damaged_is_refused(self) -> None:
        """With an error of the project's own."""
        for rows, columns, weights, parts in self._cases():
            for wrong in (float("nan"), float("inf")):
                bad = weights.clone()
                bad[rows // 2, columns // 2] = wrong
                refused(lambda bad=bad: self.codec.encode(bad), f"a weight of {wrong}")
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
