"""A commit record is whole or it is none, at every byte. Run: pytest tests/store/test_record.py"""

from hypothesis import given
from hypothesis import strategies as st

from headrace.machine.host_memory import huge_page_buffer
from headrace.store.record import CommitRecord, RecordFiles, pack_record, unpack_record
from headrace.store.slots import GroupVersion
from headrace.testing import MemoryFile

RUN = "0123456789abcdef"
CHUNKS = [2, 0, 1]


def make_record(sequence: int, note: str = "x") -> CommitRecord:
    groups = (GroupVersion(0, sequence, (2**64 - 1, 7)), GroupVersion(-1, 0, ()), GroupVersion(1, 3, (0,)))
    return CommitRecord(run_id=RUN, sequence=sequence, payload={"step": sequence, "note": note}, groups=groups)


def test_a_record_survives_packing() -> None:
    assert unpack_record(pack_record(make_record(5)) + bytes(100), RUN, CHUNKS) == make_record(5)


def test_a_record_cut_at_any_byte_is_none() -> None:
    before = make_record(3, "a longer note than the other, so that lengths differ")
    content, older = pack_record(make_record(5)), pack_record(before)
    for cut in range(len(content)):
        assert unpack_record(content[:cut], RUN, CHUNKS) is None
        assert unpack_record(content[:cut] + older[cut:], RUN, CHUNKS) == (before if content[:cut] == older[:cut] else None)


@given(st.data())
def test_a_record_with_any_flipped_bit_is_none(data: st.DataObject) -> None:
    content = bytearray(pack_record(make_record(5)))
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert unpack_record(bytes(content), RUN, CHUNKS) is None


def test_a_record_of_another_run_or_shape_is_none() -> None:
    content = pack_record(make_record(5))
    assert unpack_record(content, "f" * 16, CHUNKS) is None
    assert unpack_record(content, RUN, [2, 1, 1]) is None


def test_two_files_take_turns_and_the_newest_wins() -> None:
    files = [MemoryFile(4096), MemoryFile(4096)]
    records = RecordFiles(files)
    assert records.read(RUN, CHUNKS) == (None, False)
    for sequence in (1, 2, 3):
        records.write(sequence, pack_record(make_record(sequence, "long " * 2000)))
        assert records.read(RUN, CHUNKS) == (make_record(sequence, "long " * 2000), False)
    page = huge_page_buffer(4096)
    page[:] = 1
    files[1].write_from(4096, page)
    assert records.read(RUN, CHUNKS) == (make_record(2, "long " * 2000), True)
    records.erase(3)
    assert records.read(RUN, CHUNKS)[0] == make_record(2, "long " * 2000)
