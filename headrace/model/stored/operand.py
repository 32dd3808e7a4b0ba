"""A matrix that stays in its code: what stands in a module where a parameter stood, on the host as on a device.

`linear` and `matmul` with it are all that it answers. Few rows are multiplied with the codes themselves where that can be done,
others with the matrix decoded into a workspace. Whatever else a module does with it is an error, by which trials find
architectures that need decoded weights.

Invariant: the way of a product follows from its shape alone. Only products of few rows have other bits than those of decoded
weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._C import _nn

from headrace.codec import Parts
from headrace.codec.published.lines import HasLines
from headrace.codec.published.packed import PackedMatrix, is_packable
from headrace.model.stored.decoding import Decoding
from headrace.terms.errors import ModelError

_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class Workspace:
    """Memory of `dtype` in which one matrix at a time is decoded. Up to `rows` rows are multiplied with codes themselves.

    Those that torch's kernel takes are packed for it: once where they `stay` as they were read, else for each product.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.rows, self.stay, self._flat = dtype, 0, False, torch.empty(0, dtype=dtype)
        self.packed: dict[int, PackedMatrix] = {}

    def use(self, rows: int, *, stay: bool) -> None:
        """Say what is as above."""
        self.free()
        self.rows, self.stay = rows, stay

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        """Return room for so many numbers, in place of what was returned before."""
        if self._flat.numel() < count or self._flat.device != device:
            self._flat = torch.empty(0, dtype=self.dtype)  # the smaller one is freed first
            self._flat = torch.empty(count, dtype=self.dtype, device=device)
        return self._flat[:count]

    def free(self) -> None:
        """Free the memory."""
        self.packed.clear()
        self._flat = torch.empty(0, dtype=self.dtype)


class CodedOperand:
    """A parameter of this `shape`, decoded by `decoding` from the bytes `read` (uint8), wherever these lie."""

    def __init__(self, decoding: Decoding, read: torch.Tensor, shape: Sequence[int], workspace: Workspace) -> None:
        self._decoding, self._read, self._workspace = replace(decoding, start=0), read, workspace
        self.shape, self.dtype, self.device = torch.Size(shape), workspace.dtype, read.device

    @property
    def codec(self) -> Any:
        """The code."""
        return self._decoding.codec

    def parts(self) -> Parts:
        """Return the tensors of the code."""
        return self._decoding.tensors(self._read)

    def rows_times(self, rows: torch.Tensor, *, transposed: bool) -> torch.Tensor | None:
        """Return `rows` (..., inputs) times the matrix, or its transpose: (..., outputs); None where its codes cannot."""
        inputs, codec, matrix = rows.shape[-1], self._decoding.codec, (self._decoding.rows, self._decoding.columns)
        if rows.device.type != "cpu" or rows.numel() > self._workspace.rows * inputs or not isinstance(codec, HasLines):
            return None
        if is_packable(codec, *matrix, rows.dtype):
            return self._packed().multiply(rows.reshape(-1, inputs)).view(*rows.shape[:-1], self.shape[0])
        lines = codec.lines(self.parts(), self._decoding.columns)
        if lines is None or lines.across is transposed:
            return None
        return lines.times(rows.reshape(-1, inputs).float()).to(rows.dtype).view(*rows.shape[:-1], lines.count)

    def _packed(self) -> PackedMatrix:
        parts, known = self.parts(), self._workspace.packed
        where = parts["weight_packed"].data_ptr()
        found = known.get(where) or PackedMatrix(parts, self.codec.group or self.shape[1])
        if self._workspace.stay:
            known[where] = found
        return found

    def decoded(self) -> torch.Tensor:
        """Return the matrix; it is valid until the next one is decoded."""
        flat = self._workspace.take(self.shape.numel(), self.device)
        self._decoding.put(self._read, flat)
        return flat.view(self.shape)

    @classmethod
    def few(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return what `linear` or `matmul` gives where the codes themselves are multiplied; None where they are not.

        Raises:
            ModelError: it is asked for something else.
        """
        given = dict(zip(("input", "weight", "bias") if func is _nn.linear else ("input", "other"), args, strict=False))
        given |= kwargs
        rows, matrix, bias = given.get("input"), given.get("weight", given.get("other")), given.get("bias")
        if func not in (_nn.linear, *_MATMULS) or not isinstance(matrix, cls) or not isinstance(rows, torch.Tensor):
            raise ModelError(f"{getattr(func, '__name__', func)} is asked of a matrix that stays in its code")
        with torch._C.DisableTorchFunction():  # modes would send each operator through Python
            found = matrix.rows_times(rows, transposed=func is _nn.linear)
            return found if bias is None or found is None else found.add_(bias)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        """Answer `linear` and `matmul`. Raises as `few` does."""
        given = kwargs or {}
        if (found := cls.few(func, args, given)) is not None:
            return found
        dense = {name: each.decoded() if isinstance(each, cls) else each for name, each in given.items()}
        product: torch.Tensor = func(*(each.decoded() if isinstance(each, cls) else each for each in args), **dense)
        return product
