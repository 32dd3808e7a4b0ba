"""A unit under a code: which of its parameters the code takes, and where the parts of all lie."""

from collections.abc import Iterable, Mapping, Sequence

from headrace.codec.codec import Codec
from headrace.codec.table import Code
from headrace.terms.coding import PLAIN, CodedUnit, CodePart, as_matrix, lay_out_parts
from headrace.terms.layout import ParameterSpec, PlaneSet, UnitLayout

# Matrices with fewer rows stay as they are.
_LEAST_ROWS = 8


def coded_unit(layout: UnitLayout, codec: Codec, planes: PlaneSet) -> CodedUnit:
    """Return where the parts of a unit lie: each parameter is a matrix that `codec` codes, or lies plain where it does not."""
    matrices: list[tuple[int, int, int, str | None, Iterable[CodePart]]] = []
    for spec in layout.parameters:
        rows, columns = as_matrix(spec.shape)
        if codec.takes(rows, columns):
            matrices.append((spec.offset, rows, columns, codec.name, codec.places(rows, columns)))
        else:
            matrices.append((spec.offset, rows, columns, None, (plain_part(planes, rows, columns),)))
    return lay_out_parts(matrices)


def plain_part(planes: PlaneSet, rows: int, columns: int) -> CodePart:
    """Return the part of a matrix that lies as compute reads it."""
    return CodePart(PLAIN, planes.compute_dtype, planes.weight.bytes_per_element, (rows, columns))


def decoding_bytes(code: CodedUnit, codecs: Mapping[str, Codec], *, on_host: bool = True) -> int:
    """Return the most bytes that decoding a unit, one matrix after the other, allocates at once."""
    coded = ((codecs[each.codec], each) for each in code.matrices if each.codec)
    return max((codec.decoding_bytes(each.rows, each.columns, on_host=on_host) for codec, each in coded), default=0)


def coded_shapes(parameters: Sequence[ParameterSpec], code: Code) -> list[ParameterSpec]:
    """Return the parameters of a block that are coded: stacks of experts alone, where the code is for these.

    Matrices of few rows, and those that choose among experts, stay; under a lossless code only those that would not shrink.
    """
    if code.lossless:
        matrices = [spec for spec in parameters if len(spec.shape) in (2, 3)]
        return [spec for spec in matrices if code.matrix_bytes(*as_matrix(spec.shape)) < 2 * spec.num_elements]
    stacks = [spec for spec in parameters if len(spec.shape) == 3]
    counts = {spec.shape[0] for spec in stacks}
    plain = [
        spec for spec in parameters if len(spec.shape) == 2 and spec.shape[0] not in counts and spec.shape[0] >= _LEAST_ROWS
    ]
    return stacks if code.experts_alone and stacks else stacks + plain
