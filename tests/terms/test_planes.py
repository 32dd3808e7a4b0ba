"""Planes and layouts: sizes for whole numbers of elements, parts, and alignments that no block of moments is cut by."""

import itertools

import pytest

from headrace.terms.errors import ConfigError
from headrace.terms.layout import COMPUTE_DTYPES, UNIT_ALIGNMENT, lay_out, realigned
from headrace.update.rules.adamw import adamw_planes
from headrace.update.rules.moment_planes import MOMENTS

# Sizes that are multiples of nothing, in two groups.
PARAMETERS = [
    ("a", (7, 100), (1.0, 0.1)),
    ("norm", (33,), (1.0, 0.0)),
    ("b", (300, 11), (1.0, 0.1)),
    ("bias", (5,), (1.0, 0.0)),
]


def test_a_parameter_takes_so_many_bytes() -> None:
    """bfloat16 compute: 12 bytes with fp32 moments, 8 with bfloat16 ones, 6 and 1/32 with 8 bits."""
    num_elements = 512 * UNIT_ALIGNMENT
    sizes = {moments: adamw_planes("bfloat16", moments).num_bytes(num_elements) / num_elements for moments in MOMENTS}
    assert sizes == {"float32": 12, "bfloat16": 8, "int8": 6 + 2 * 4 / 256}


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_states_lie_back_to_back_in_whole_pages(compute_dtype: str, moments: str) -> None:
    planes = adamw_planes(compute_dtype, moments)
    assert planes.state_bytes(0) == 0
    for num_elements in (UNIT_ALIGNMENT, 3 * UNIT_ALIGNMENT, 1 << 20):
        parts = list(planes.split_states(num_elements))
        assert [plane for plane, _ in parts] == list(planes.states)
        assert parts[0][1].start == 0
        assert all(before.stop == after.start for (_, before), (_, after) in itertools.pairwise(parts))
        assert all(part.start % plane.bytes_per_element == 0 for plane, part in parts)
        assert planes.state_bytes(num_elements) % 4096 == 0
        assert 0 <= planes.state_bytes(num_elements) - parts[-1][1].stop < 4096


@pytest.mark.parametrize("moments", MOMENTS)
def test_no_block_of_moments_has_elements_of_two_parameters(moments: str) -> None:
    block = adamw_planes("bfloat16", moments).block_elements
    layout = lay_out("unit", PARAMETERS, adamw_planes("bfloat16", moments).parameter_alignment)
    blocks = [range(p.offset // block, -(-(p.offset + p.num_elements) // block)) for p in layout.parameters]
    taken = [number for part in blocks for number in part]
    assert len(taken) == len(set(taken))
    assert all(group.start % block == 0 for group in layout.groups)
    assert layout.num_elements % UNIT_ALIGNMENT == 0


def test_layouts_of_runs_that_exist_stay_as_they_are() -> None:
    layout = lay_out("unit", PARAMETERS)
    assert [parameter.offset for parameter in layout.parameters] == [0, 704, 4032, 4096]
    assert adamw_planes("bfloat16").parameter_alignment == 32
    assert realigned(lay_out("unit", PARAMETERS, 256), 32) == layout
    assert realigned(layout, 256) == lay_out("unit", PARAMETERS, 256)


def test_a_plane_set_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="compute_dtype: 'int8' is not one of"):
        adamw_planes("int8")
