"""Arrays of samples, element by element. Run: pytest tests/data/test_data_json_array.py"""

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_long_lines import VALUES, alike

from headrace.data.read import sources
from headrace.data.read.json_array import elements
from headrace.data.read.sources import find_sources, read_rows
from headrace.terms.errors import DataError


def pieces_of(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


def rows_of(path, text):
    path.write_bytes(text)
    return list(read_rows(find_sources([str(path)], path.parent)[0])[1])


@given(
    values=st.lists(VALUES, max_size=5),
    is_ascii=st.booleans(),
    indent=st.sampled_from([None, 1]),
    most=st.integers(14, 400),
    size=st.integers(1, 30),
)
@settings(max_examples=150, deadline=None)
def test_the_elements_are_those_of_the_array_whatever_the_pieces(values, is_ascii, indent, most, size):
    text = json.dumps(values, ensure_ascii=is_ascii, indent=indent).encode()
    try:
        found = list(elements("a", pieces_of(b" \n" + text + b"\n", size), most))
    except DataError:
        assert len(text) > 4 * most
        return
    assert len(found) == len(values)
    assert all(alike(json.loads(one.text), value, most) for one, value in zip(found, values, strict=True))
    assert sum(len(one.text) + one.left_out for one in found) + max(0, len(found) - 1) == len(text) - 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            b'[\n {"text": "x"},\n {"text": }\n]',
            r"a.json, element 1: not JSON at line 3, column 11: Expecting value; expected an",
        ),
        (b'[{"text": "x"},]', r"a.json, element 1: not JSON at column 1: Expecting value"),
        (b'[{"text": "x"} {"text": "y"}]', r"a.json, element 0: not JSON at column 15: Extra data"),
        (b'[{"text": "x"}}, {"text": "y"}]', r"a.json, element 0: not JSON at column 14: Extra data"),
        (b'[{"text": "x"}', r"a.json: not JSON: the array has no end, 0 elements were read"),
        (b'[{"text": "x"}, {"text": "y', r"a.json, element 1: not JSON at column 11: Unterminated string"),
        (b'[{"text": "x"}] [{"text": "y"}]', r"a.json: not JSON: b'\[{\"text\": \"y\"}\]' follows the array"),
        (b'[{"text": "x"}, 7]', r"a.json, element 1: expected a JSON object .*, found int '7'"),
        (b"[ ]", "a.json: holds no samples"),
    ],
)
def test_what_is_wrong_with_an_array_is_named_with_its_place(tmp_path, text, found):
    with pytest.raises(DataError, match=found):
        rows_of(tmp_path / "a.json", text)


def test_of_a_string_that_is_very_long_only_the_beginning_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_LEAST_STRING_BYTES", 100)
    monkeypatch.setattr(sources, "_PIECE_BYTES", 50)
    short, long = {"text": "the quick "}, {"text": "brown fox " * 100, "id": [1, 2]}
    found = rows_of(tmp_path / "a.json", json.dumps([short, long, short]).encode())
    assert [row.unread for row in found] == [0, pytest.approx(900 / 130, rel=0.05), 0]
    assert [dict(row.values) for row in found] == [short, {"text": ("brown fox " * 10)[:100], "id": [1, 2]}, short]
    with pytest.raises(DataError, match=r"a.json, element 1: more than 400 bytes in it; cut it into several"):
        rows_of(tmp_path / "a.json", json.dumps([short, {"text": "x", "more": ["brown fox "] * 50}]).encode())


def test_an_array_takes_the_memory_of_a_piece(tmp_path, monkeypatch):
    """It was read and parsed whole."""
    (tmp_path / "a.json").write_bytes(json.dumps([{"text": "the quick brown fox " * 50}] * 3_000).encode())
    (source,) = find_sources([str(tmp_path / "a.json")], tmp_path)
    monkeypatch.setattr(sources, "_PIECE_BYTES", 1 << 16)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_rows(source)[1]) == 3_000
        assert tracemalloc.get_traced_memory()[1] < 600_000
    finally:
        tracemalloc.stop()
