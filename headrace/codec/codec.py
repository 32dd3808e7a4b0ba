"""What a code for frozen weights is: planes that lie on the drives and cross the links, and are decoded for compute."""

from typing import Protocol

from torch import Tensor

from headrace.terms.layout import Plane


class Codec(Protocol):
    """A code for the weights of a frozen unit. Its planes may have one number for several elements (a scale for each group)."""

    @property
    def name(self) -> str:
        """What a run's record says: a state goes on under the code that it was written in."""

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of coded weights, in order: they lie back to back."""

    def encode(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Return the planes of `weights`, a flat tensor of the compute dtype; each as its `Plane` says."""

    def decode(self, planes: tuple[Tensor, ...], into: Tensor) -> None:
        """Fill `into`, a flat tensor of the compute dtype, from the planes; all are on one device."""

    def decoding_bytes(self, num_elements: int) -> int:
        """Return the most that `decode` allocates at once for so many elements."""
