"""The slot rule by itself, and where slots lie. Run: pytest tests/store/test_slots.py"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.store import place_units
from headrace.store.slots import VIRGIN, GroupSlots, GroupVersion
from headrace.terms.errors import ConfigError, StorageError
from headrace.terms.families import trained_unit
from headrace.terms.layout import COMPUTE_DTYPES, Plane, PlaneSet, UnitLayout
from headrace.update.rules.adamw import adamw_planes
from headrace.update.rules.moment_planes import MOMENTS


def write_all(slots: GroupSlots, checksum: int = 1) -> None:
    for chunk in range(slots.num_chunks):
        slots.note_write(chunk, checksum)


def test_a_new_group_is_virgin_and_its_first_version_goes_to_slot_0() -> None:
    slots = GroupSlots("g", 2)
    assert slots.slot_to_read([0, 1]) == VIRGIN
    assert slots.slot_to_write == 0
    assert slots.newest(1) == GroupVersion(VIRGIN, 0, (0, 0))


def test_versions_take_turns_and_an_unwritten_group_keeps_its_slot() -> None:
    slots = GroupSlots("g", 2)
    for version, slot in ((1, 0), (2, 1), (3, 0)):
        assert slots.slot_to_write == slot
        write_all(slots, version)
        slots.commit(slots.newest(version))
        assert slots.committed == GroupVersion(slot, version, (version, version))
    slots.commit(slots.newest(4))
    assert slots.committed == GroupVersion(0, 3, (3, 3))


def test_several_versions_between_commits_share_one_slot() -> None:
    slots = GroupSlots("g", 2, GroupVersion(1, 5, (9, 9)))
    for checksum in (1, 2, 3):
        write_all(slots, checksum)
        assert slots.slot_to_write == slots.slot_to_read([0, 1]) == 0
    assert slots.newest(6) == GroupVersion(0, 6, (3, 3))


def test_a_half_written_version_is_neither_read_nor_committed() -> None:
    slots = GroupSlots("unit block 3, states", 3, GroupVersion(1, 5, (9, 9, 9)))
    slots.note_write(1, 7)
    assert slots.slot_to_read([0, 1, 2]) == 1
    with pytest.raises(StorageError, match=r"unit block 3, states: commit asked while 2 of 3 chunks"):
        slots.newest(6)
    slots.note_write(1, 8)  # again, as after an error
    assert slots.num_missing == 2
    slots.abandon()
    assert slots.newest(6).version == 5


def test_a_version_that_is_being_overwritten_is_read_only_where_it_is_still_whole() -> None:
    slots = GroupSlots("g", 3, GroupVersion(1, 5, (9, 9, 9)))
    write_all(slots)
    slots.note_write(0, 2)
    assert slots.slot_to_read([1, 2]) == 0
    with pytest.raises(StorageError, match="chunk 0 was asked"):
        slots.slot_to_read([0, 1, 2])
    with pytest.raises(StorageError, match="commit asked"):
        slots.newest(6)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(1, 12),
    st.sampled_from(sorted(COMPUTE_DTYPES)),
    st.sampled_from(MOMENTS),
)
def test_slots_never_overlap_and_chunks_are_aligned(sizes: list[int], chunk: int, planes: str, moments: str) -> None:
    layouts = [UnitLayout(f"u{index}", (), (), size * 2048) for index, size in enumerate(sizes)]
    places = place_units([trained_unit(layout, adamw_planes(planes, moments), chunk * 2048) for layout in layouts])
    taken: list[tuple[int, int]] = []
    for place in places.committed:
        for slot in (0, 1):
            for index in range(place.num_chunks):
                start = place.offset(slot, index)
                taken.append((start, start + place.chunk_bytes(index)))
    taken.sort()
    assert all(start % 4096 == 0 and start < stop for start, stop in taken)
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(taken))
    # Codes of one byte, and eight scales of four bytes for 2048 elements, in whole pages for each chunk.
    moment_bytes = {"float32": 8, "bfloat16": 4, "int8": 2}[moments]
    exact_bytes = sum(sizes) * 2048 * ({"bfloat16": 4, "float32": 4, "float16": 6}[planes] + moment_bytes) * 2
    num_chunks = 2 * sum(-(-size // chunk) for size in sizes)
    scale_bytes = 4096 * num_chunks if moments == "int8" else 0
    assert places.durable_bytes == exact_bytes + scale_bytes
    assert places.durable_bytes == (taken[-1][1] if taken else 0)


def test_sizes_that_cannot_be_aligned_are_refused() -> None:
    unit = UnitLayout("block 0", (), (), 4096)
    with pytest.raises(ConfigError, match="chunk of 100 elements"):
        trained_unit(unit, adamw_planes("bfloat16"), 100)
    with pytest.raises(ConfigError, match="unit block 0: 100 elements"):
        trained_unit(UnitLayout("block 0", (), (), 100), adamw_planes("bfloat16"), 2048)
    odd = PlaneSet("bfloat16", Plane("q", "uint8", 1), (Plane("m", "float32", 4),))
    with pytest.raises(ConfigError, match="1 bytes per weight"):
        trained_unit(unit, odd, 2048)
