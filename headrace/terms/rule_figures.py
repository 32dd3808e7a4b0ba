"""What plans, layouts and the store know of an update rule: its planes, how it may be cut, what it costs. A value."""

from dataclasses import dataclass
from enum import StrEnum

from headrace.terms.layout import UNIT_ALIGNMENT, PlaneSet


class Grain(StrEnum):
    """The smallest piece of a unit that a rule can update alone: chunks are cut between such pieces."""

    ELEMENT = "element"  # cuts anywhere, but for blocks of elements that share a number (`PlaneSet.block_elements`)
    ROWS = "rows"  # whole rows of a matrix: the rule computes something from each row as a whole
    MATRIX = "matrix"  # whole matrices: the rule computes something from each matrix as a whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFigures:
    """What an update rule is to those who plan it.

    Attributes:
        name: for people, and to tell rules apart whose planes differ.
        planes: the weights that compute uses, the rest of their master, and the states that the rule keeps.
        grain: where a unit may be cut.
        elementwise: a pattern of parameters, such as embeddings, that are updated element by element whatever the grain. It is
            searched in UNIT/NAME: `block.3/model.layers.3.mlp.up.weight`. Parameters with fewer than two dimensions are, too,
            unless `takes_vectors`.
        only_matrices: whether what is no matrix though its shape has two dimensions is updated element by element, too.
        takes_vectors: whether parameters with fewer than two dimensions are items of one row each; then no element is alone.
        flops_per_element: floating-point operations of one element's update, but for products of matrices.
        gram_products: how often an update multiplies a matrix by its Gram matrix, and that by itself (`item_flops`).
        core_rate: bytes per second of a core, relative to what a profile has measured with the default rule's loop.
            Below 1 where arithmetic, not memory, takes the time (bench/kernel.py).
        temporary_bytes: the most that an update on a device allocates at once, per element of its piece. An update of whole
            rows or matrices on the host allocates as much.
        device_traffic_bytes: bytes that torch's kernels read and write in device memory, per element; None: only the host
            updates.
        clips_by_rerun: updates begin as if nothing had to be clipped, and no gradient is held. If the norm says otherwise, the
            whole step runs again. For rules whose point is how little they keep.
    """

    name: str
    planes: PlaneSet
    grain: Grain = Grain.ELEMENT
    elementwise: str = ""
    only_matrices: bool = False
    takes_vectors: bool = False
    flops_per_element: float
    gram_products: int = 0
    core_rate: float = 1.0
    temporary_bytes: int
    device_traffic_bytes: int | None = None
    clips_by_rerun: bool = False

    @property
    def parameter_alignment(self) -> int:
        """Elements by which each parameter of a unit is aligned: where grains are larger than an element, a page."""
        return max(self.planes.parameter_alignment, 1 if self.grain is Grain.ELEMENT else UNIT_ALIGNMENT)

    def traffic_bytes(self, num_elements: int, gradient_bytes_per_element: int) -> int:
        """Return the bytes of memory that the host's update of so many elements reads and writes: planes both ways, gradients
        once.
        """
        return 2 * self.planes.num_bytes(num_elements) + num_elements * gradient_bytes_per_element

    def item_flops(self, rows: int, columns: int) -> float:
        """Return the operations of the products of one matrix's update: for sides s <= l each takes 4 s^2 l + 2 s^3."""
        short, long = sorted((rows, columns))
        return self.gram_products * (4.0 * short**2 * long + 2.0 * short**3)

    def flops(self, num_elements: int) -> float:
        """Return the floating-point operations of an update of so many elements."""
        return self.flops_per_element * num_elements
