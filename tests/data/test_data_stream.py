"""Token sets to batches, and the position that a run keeps. Run: pytest tests/data/test_data_stream.py"""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import make_tokens, numbered_tokens

from headrace.data import IGNORED, BatchStream, DataSpec
from headrace.terms.errors import DataError

LENGTHS = st.lists(st.integers(2, 16), min_size=1, max_size=40)
BASE = DataSpec(paths=("unused",), sequence_length=16, tokens_per_step=48, seed=3)
SPECS = st.builds(
    lambda rows, seed, packing, shuffle: replace(BASE, tokens_per_step=16 * rows, seed=seed, packing=packing, shuffle=shuffle),
    rows=st.integers(1, 5),
    seed=st.integers(0, 9),
    packing=st.booleans(),
    shuffle=st.booleans(),
)


def folder(factory):
    return factory.mktemp("tokens") / "set"


def arrays_of(batch):
    return {field.name: getattr(batch, field.name) for field in fields(batch)}


def assert_equal(one, other):
    for name, value in arrays_of(one).items():
        expected = arrays_of(other)[name]
        assert np.array_equal(value, expected) if isinstance(value, np.ndarray) else value == expected, name


def real_tokens(batch):
    """Ids that are no padding: `numbered_tokens` counts from 1, padding is 0."""
    return batch.input_ids[batch.input_ids != 0].tolist()


@given(lengths=LENGTHS, spec=SPECS)
@settings(max_examples=40, deadline=None)
def test_an_epoch_holds_every_token_once(tmp_path_factory, lengths, spec):
    tokens = numbered_tokens(folder(tmp_path_factory), lengths, 16)
    stream = BatchStream(tokens, replace(spec, tokens_per_step=16))
    num_rows = round(stream.steps_per_epoch)
    for _ in range(2):
        seen = [token for _ in range(num_rows) for token in real_tokens(stream.next_batch())]
        assert sorted(seen) == list(range(1, sum(lengths) + 1))
        # Other epochs may take another number of rows; follow the stream to its end of the epoch.
        num_rows = len(stream._lay_out(1))
    assert (stream.state()["epoch"], stream.state()["row_index"]) == (1, num_rows)


@given(lengths=LENGTHS, spec=SPECS.filter(lambda spec: spec.packing))
@settings(max_examples=40, deadline=None)
def test_packed_rows_keep_samples_whole_and_apart(tmp_path_factory, lengths, spec):
    tokens = numbered_tokens(folder(tmp_path_factory), lengths, 16)
    samples = [tokens.sample(index).input_ids for index in range(len(tokens))]
    length_of = {int(ids[0]): len(ids) for ids in samples}
    batch = BatchStream(tokens, spec).next_batch()
    assert batch.attention_mask is None
    assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape == (spec.rows_per_step, 16)
    assert {array.dtype for array in (batch.input_ids, batch.labels, batch.position_ids)} == {np.dtype(np.int64)}
    assert (batch.token_mask == (batch.input_ids != 0)).all(), "numbered tokens begin with 1, filling is 0"
    for ids, labels, positions in zip(batch.input_ids, batch.labels, batch.position_ids, strict=True):
        starts = np.flatnonzero(positions == 0).tolist()
        assert starts[0] == 0
        for start, stop in zip(starts, [*starts[1:], 16], strict=True):
            assert positions[start:stop].tolist() == list(range(stop - start))
            assert labels[start] == IGNORED
            if ids[start] == 0:
                assert stop == 16, "padding only at the end of a row"
                assert not ids[start:].any()
                assert (labels[start:] == IGNORED).all()
            else:
                assert int(ids[start]) in length_of
                assert length_of[int(ids[start])] == stop - start
                assert ids[start:stop].tolist() == list(range(ids[start], ids[start] + stop - start))
                assert (labels[start + 1 : stop] == ids[start + 1 : stop]).all()


@given(lengths=LENGTHS, spec=SPECS.filter(lambda spec: not spec.packing))
@settings(max_examples=30, deadline=None)
def test_padded_rows_are_one_sample_each_with_a_mask(tmp_path_factory, lengths, spec):
    tokens = numbered_tokens(folder(tmp_path_factory), lengths, 16)
    batch = BatchStream(tokens, spec).next_batch()
    assert batch.position_ids is None
    assert batch.input_ids.shape[0] == spec.rows_per_step
    assert batch.input_ids.shape[1] == batch.attention_mask.sum(axis=1).max()
    for ids, labels, mask in zip(batch.input_ids, batch.labels, batch.attention_mask, strict=True):
        length = int(mask.sum())
        assert mask.tolist() == [1] * length + [0] * (len(mask) - length)
        assert length in lengths
        assert ids[:length].tolist() == list(range(ids[0], ids[0] + length))
        assert (labels[length:] == IGNORED).all()
        assert labels[0] == IGNORED
        assert (labels[1:length] == ids[1:length]).all()


@given(
    samples=st.lists(st.lists(st.booleans(), min_size=2, max_size=16).filter(lambda mask: any(mask[1:])), min_size=1),
    spec=SPECS,
)
@settings(max_examples=30, deadline=None)
def test_labels_are_the_ids_where_trained_and_the_counts_agree(tmp_path_factory, samples, spec):
    ids, made = iter(range(1, 10**6)), []
    for mask in samples:
        made.append(([next(ids) for _ in mask], mask))
    trained_ids = {token for tokens, mask in made for token, trained in list(zip(tokens, mask, strict=True))[1:] if trained}
    batch = BatchStream(make_tokens(folder(tmp_path_factory), made, 16), spec).next_batch()
    is_trained = batch.labels != IGNORED
    assert (batch.labels[is_trained] == batch.input_ids[is_trained]).all()
    assert {int(token) for token in batch.input_ids.flat if int(token) in trained_ids} == set(batch.labels[is_trained].tolist())
    assert batch.num_trained_tokens == is_trained.sum()
    assert batch.num_tokens == np.count_nonzero(batch.input_ids)


@given(lengths=LENGTHS, spec=SPECS, before=st.integers(0, 30))
@settings(max_examples=40, deadline=None)
def test_resuming_anywhere_gives_the_batches_that_would_have_come(tmp_path_factory, lengths, spec, before):
    tokens = numbered_tokens(folder(tmp_path_factory), lengths, 16)
    unbroken = BatchStream(tokens, spec)
    for _ in range(before):
        unbroken.next_batch()
    state = json.loads(json.dumps(unbroken.state()))
    resumed = BatchStream(tokens, spec)
    resumed.restore(state)
    assert resumed.state() == state
    assert resumed.steps_per_epoch == unbroken.steps_per_epoch
    for _ in range(5):
        assert_equal(resumed.next_batch(), unbroken.next_batch())
    assert resumed.state() == unbroken.state()


def test_restoring_lays_out_one_epoch_and_fetches_no_sample(tmp_path, monkeypatch):
    tokens = numbered_tokens(tmp_path / "set", [5] * 50, 16)
    stream = BatchStream(tokens, BASE)
    for _ in range(40):
        stream.next_batch()
    state, fresh, laid_out = stream.state(), BatchStream(tokens, BASE), []
    lay_out = fresh._lay_out
    monkeypatch.setattr(BatchStream, "_lay_out", lambda _, epoch: laid_out.append(epoch) or lay_out(epoch))
    monkeypatch.setattr(type(tokens), "sample", None)
    fresh.restore(state)
    assert laid_out == [state["epoch"]]
    assert state["epoch"] > 2


def test_epochs_differ_when_shuffled_and_repeat_when_not(tmp_path):
    tokens = numbered_tokens(tmp_path / "set", [16] * 12, 16)
    for shuffle in (True, False):
        stream = BatchStream(tokens, replace(BASE, tokens_per_step=12 * 16, shuffle=shuffle))
        first, second = (stream.next_batch().input_ids[:, 0].tolist() for _ in range(2))
        assert sorted(first) == sorted(second)
        assert (first != second) == shuffle
        assert (first == sorted(first)) != shuffle


def test_a_step_larger_than_the_data_goes_round_several_times(tmp_path):
    tokens = numbered_tokens(tmp_path / "set", [16, 16], 16)
    stream = BatchStream(tokens, replace(BASE, tokens_per_step=16 * 5))
    assert stream.steps_per_epoch == pytest.approx(0.4)
    batch = stream.next_batch()
    assert (batch.num_tokens, batch.num_trained_tokens) == (80, 75)
    assert (stream.state()["epoch"], stream.state()["row_index"]) == (2, 1)


def test_another_number_of_tokens_per_step_continues_with_the_same_rows(tmp_path):
    tokens = numbered_tokens(tmp_path / "set", [16] * 20, 16)
    stream, other = BatchStream(tokens, BASE), BatchStream(tokens, replace(BASE, tokens_per_step=16))
    stream.next_batch()
    other.restore(stream.state())
    following = np.concatenate([other.next_batch().input_ids for _ in range(3)])
    assert np.array_equal(following, stream.next_batch().input_ids)


@pytest.mark.parametrize("change", [{"seed": 4}, {"packing": False}, {"shuffle": False}, {"sequence_length": 17}])
def test_a_position_under_other_options_is_refused(tmp_path, change):
    tokens = numbered_tokens(tmp_path / "set", [5] * 20, 16)
    state = BatchStream(tokens, BASE).state()
    with pytest.raises(DataError, match=f"{next(iter(change))} was"):
        BatchStream(tokens, replace(BASE, **change)).restore(state)


def test_a_position_in_other_data_or_a_damaged_one_is_refused_and_nothing_moves(tmp_path):
    stream = BatchStream(numbered_tokens(tmp_path / "a", [5] * 20, 16), BASE)
    other = BatchStream(numbered_tokens(tmp_path / "b", [5] * 21, 16), BASE)
    before = stream.state()
    good = dict(before)
    for bad, found in (
        (other.state(), "samples_digest was"),
        ({}, "unknown"),
        (good | {"row_checksum": 1}, "is not in the order"),
        (good | {"row_index": 10**6}, "is not in the order"),
        (good | {"epoch": -1}, "is not in the order"),
        (good | {"row_index": "x"}, "damaged"),
    ):
        with pytest.raises(DataError, match=found):
            stream.restore(bad)
        assert stream.state() == before


def test_what_not_packing_costs_is_said(tmp_path):
    lengths = [16, 2, 2, 2, 8, 8, 8, 8, 3]  # three rows a step, in their order: 48, 24 and 24 tokens computed
    stream = BatchStream(numbered_tokens(tmp_path / "set", lengths, 16), replace(BASE, packing=False, shuffle=False))
    padding = sum(int((stream.next_batch().attention_mask == 0).sum()) for _ in range(3))
    assert padding == 96 - sum(lengths) == 39
    assert stream.notices == ("not packed: 41% of the tokens computed are padding",)
    assert BatchStream(numbered_tokens(tmp_path / "set", lengths, 16), BASE).notices == ()
    alike = numbered_tokens(tmp_path / "alike", [7] * 6, 16)
    assert BatchStream(alike, replace(BASE, packing=False)).notices == ()


def test_samples_longer_than_a_row_are_refused(tmp_path):
    with pytest.raises(DataError, match="a sample has 16 tokens, a row only 8"):
        BatchStream(numbered_tokens(tmp_path / "a", [16], 16), replace(BASE, sequence_length=8))
