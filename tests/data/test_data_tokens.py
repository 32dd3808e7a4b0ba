"""The token cache: what is stored, when it is used again, what is left out. Run: pytest tests/data/test_data_tokens.py"""

import errno
import json
import os
import shutil
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import PLAIN, TAGGED, make_tokenizer, make_tokens, numbered_tokens

from headrace.data import BatchStream, DataSpec, TokenSet, load_tokens, write_tokens
from headrace.data.tokens import token_writer, tokenize
from headrace.data.values import block_array
from headrace.data.values.values import Encoded
from headrace.terms.errors import ConfigError, CorruptData, DataError, DiskFull

SAMPLES = st.lists(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=0, max_size=12).map(
        lambda pairs: ([token for token, _ in pairs], [trained for _, trained in pairs])
    ),
    min_size=1,
    max_size=30,
)


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"the quick fox {index}"}) + "\n" for index in range(20)))
    return DataSpec(paths=(str(path),), sequence_length=64, tokens_per_step=128)


def ids_of(made: TokenSet) -> list[list[int]]:
    return [made.sample(index).input_ids.tolist() for index in range(len(made))]


def cached(cache):
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


@given(samples=SAMPLES, length=st.integers(2, 12), flush=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_what_is_written_is_read_back_for_any_samples(tmp_path_factory, samples, length, flush):
    directory = tmp_path_factory.mktemp("tokens") / "set"
    kept = [(ids[:length], [False, *trained[1:length]]) for ids, trained in samples if any(trained[1:length])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_writer, "_FLUSH_TOKENS", flush)
        if not kept:
            with pytest.raises(DataError, match="no token of the data set is trained"):
                make_tokens(directory, samples, length)
            assert not list(directory.parent.iterdir())
            return
        made = make_tokens(directory, samples, length)
    assert ids_of(made) == [ids for ids, _ in kept]
    assert [made.sample(index).trained.tolist() for index in range(len(made))] == [trained for _, trained in kept]
    assert made.info.tokens == len(made.tokens) == sum(len(ids) for ids, _ in kept)
    assert made.info.largest_id == max(max(ids) for ids, _ in kept)
    assert made.info.trained_tokens == sum(sum(trained) for _, trained in kept)
    assert made.info.dropped_samples == len(samples) - len(kept)
    assert made.info.cut_tokens == sum(max(0, len(ids) - length) for ids, _ in samples)
    assert made.lengths.tolist() == [len(ids) for ids, _ in kept]


def test_the_digest_tells_samples_apart_and_the_names_of_files_do_not_matter(tmp_path):
    one = make_tokens(tmp_path / "a", [([1, 2, 3], [True] * 3)], 8)
    same = make_tokens(tmp_path / "b", [([1, 2, 3], [True] * 3)], 8)
    masked = make_tokens(tmp_path / "c", [([1, 2, 3], [True, False, True])], 8)
    split = make_tokens(tmp_path / "d", [([1, 2], [True] * 2), ([3, 4], [True] * 2)], 8)
    joined = make_tokens(tmp_path / "e", [([1, 2, 3, 4], [True] * 4)], 8)
    assert one.info.digest == same.info.digest
    assert len({made.info.digest for made in (one, masked, split, joined)}) == 4


def test_the_second_run_takes_the_cache_and_does_not_tokenise(tmp_path, spec, monkeypatch):
    tokenizer = make_tokenizer()
    first = load_tokens(spec, tokenizer, tmp_path / "cache")

    def never(*arguments):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(tokenize, "encode_rows", never)
    again = load_tokens(spec, tokenizer, tmp_path / "cache")
    assert ids_of(again) == ids_of(first)
    assert isinstance(again.sample(0).input_ids.base, np.memmap)


def test_a_tokenizer_loaded_anew_finds_the_cache(tmp_path, spec):
    make_tokenizer(PLAIN).save_pretrained(tmp_path / "model")
    load = type(make_tokenizer()).from_pretrained
    load_tokens(spec, load(tmp_path / "model"), tmp_path / "cache")
    load_tokens(spec, load(tmp_path / "model"), tmp_path / "cache")
    assert len(cached(tmp_path / "cache")) == 1


def test_any_change_of_file_tokenizer_template_or_length_is_tokenised_anew(tmp_path, spec):
    cache = tmp_path / "cache"
    first = load_tokens(spec, make_tokenizer(), cache)
    load_tokens(replace(spec, sequence_length=32), make_tokenizer(), cache)
    load_tokens(spec, make_tokenizer(PLAIN), cache)
    load_tokens(spec, make_tokenizer(TAGGED), cache)
    longer = make_tokenizer()
    longer.add_tokens(["fox"])
    load_tokens(spec, longer, cache)
    path = tmp_path / "data.jsonl"
    path.write_text(path.read_text().replace("quick", "query"))
    os.utime(path, ns=(1, 1))
    changed = load_tokens(spec, make_tokenizer(), cache)
    assert len(cached(cache)) == 6
    assert ids_of(changed) != ids_of(first)


def test_options_that_do_not_change_tokens_share_the_cache(tmp_path, spec):
    for other in (spec, replace(spec, seed=7), replace(spec, packing=False), replace(spec, tokens_per_step=64)):
        load_tokens(other, make_tokenizer(), tmp_path / "cache")
    assert len(cached(tmp_path / "cache")) == 1


@pytest.mark.parametrize(
    ("name", "harm"),
    [(name, harm) for name in ("tokens", "trained", "offsets", "checksums", "info.json") for harm in ("gone", "short")]
    + [("info.json", "other"), ("info.json", "older")],
)
def test_a_damaged_cache_is_named_when_opened_and_made_again_when_used(tmp_path, spec, name, harm):
    whole = load_tokens(spec, make_tokenizer(), tmp_path / "cache")
    expected = ids_of(whole)
    directory = tmp_path / "cache" / cached(tmp_path / "cache")[0]
    file = directory / name
    if harm == "gone":
        file.unlink()
    elif harm == "short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.write_text(json.dumps({"other": 1} if harm == "other" else json.loads(file.read_text())["info"]))
    with pytest.raises(DataError, match="not a complete token cache"):
        TokenSet.open(directory)
    again = load_tokens(spec, make_tokenizer(), tmp_path / "cache")
    assert ids_of(again) == expected
    assert len(again.notices) == 1
    assert again.notices[0].startswith(f"{directory}: the token cache was damaged (")
    assert ids_of(TokenSet.open(directory)) == expected
    assert not load_tokens(spec, make_tokenizer(), tmp_path / "cache").notices


@given(where=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255), number=st.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_no_changed_byte_of_the_cache_becomes_another_token(tmp_path_factory, where, change, number):
    """Whichever byte of whichever file: an error that names the cache, or all as it was (blanks in JSON)."""
    directory = tmp_path_factory.mktemp("tokens") / "set"
    refused = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_array, "BLOCK_BYTES", 64)
        made = make_tokens(directory, [([7 * i + j for j in range(9)], [j % 3 == 1 for j in range(9)]) for i in range(20)], 8)
        expected = (ids_of(made), [made.sample(index).trained.tolist() for index in range(20)], made.info)
        file = directory / ("tokens", "trained", "offsets", "checksums", "info.json")[number]
        content = bytearray(file.read_bytes())
        content[int(where * len(content))] ^= change
        file.write_bytes(content)
        try:
            again = TokenSet.open(directory)
            found = (ids_of(again), [again.sample(index).trained.tolist() for index in range(20)], again.info)
        except (DataError, CorruptData) as error:
            refused = str(error)
    if refused is None:
        assert file.name == "info.json"
        assert found == expected
    else:
        assert str(directory) in refused


def test_a_changed_block_is_named_when_its_samples_come_and_others_can_be_had(tmp_path, monkeypatch):
    monkeypatch.setattr(block_array, "BLOCK_BYTES", 64)
    made = numbered_tokens(tmp_path / "set", [16] * 4, 16)  # one sample is one block of tokens
    file = tmp_path / "set" / "tokens"
    content = bytearray(file.read_bytes())
    content[2 * 64 + 5] ^= 1
    with file.open("r+b") as opened:
        opened.write(content)
    assert [made.sample(index).input_ids[0] for index in (0, 1, 3)] == [1, 17, 49]
    stream = BatchStream(made, DataSpec(paths=("unused",), sequence_length=16, tokens_per_step=64))
    with pytest.raises(
        CorruptData, match=rf"^{file}: the token cache is damaged: bytes 128 to 192 .* Remove {tmp_path}/set to tokenise "
    ):
        stream.next_batch()


def test_a_block_is_compared_once(tmp_path, monkeypatch):
    made = numbered_tokens(tmp_path / "set", [16] * 40, 16)
    compared, crc32 = [], zlib.crc32
    monkeypatch.setattr(block_array.zlib, "crc32", lambda data: compared.append(len(data)) or crc32(data))
    for _ in range(3):
        assert ids_of(made)[39][0] == 39 * 16 + 1
    assert sorted(compared) == [40 * 16 // 8, 40 * 16 * 4]


def test_a_failure_while_tokenising_leaves_nothing_behind(tmp_path, spec):
    path = tmp_path / "data.jsonl"
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(DataError, match=r"data\.jsonl, line 21"):
        load_tokens(spec, make_tokenizer(), tmp_path / "cache")
    assert cached(tmp_path / "cache") == []


def test_a_full_disk_is_a_named_error_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_writer.TokenWriter, "_write", full)
    with pytest.raises(DiskFull, match="no space left for the token cache"):
        write_tokens(tmp_path / "set", [(Encoded([1, 2], [True, True]), "text")], sequence_length=4)
    assert not list(tmp_path.iterdir())


def test_of_two_that_ask_at_once_one_tokenises_and_the_other_waits(tmp_path, spec, monkeypatch):
    encode_rows, calls = tokenize.encode_rows, []

    def slow(*arguments, **options):
        calls.append(arguments)
        time.sleep(0.2)
        return encode_rows(*arguments, **options)

    monkeypatch.setattr(tokenize, "encode_rows", slow)
    with ThreadPoolExecutor(2) as pool:
        sets = list(
            pool.map(lambda tokenizer: load_tokens(spec, tokenizer, tmp_path / "cache"), [make_tokenizer(), make_tokenizer()])
        )
    assert len(calls) == 1
    assert ids_of(sets[0]) == ids_of(sets[1])


def test_what_a_killed_process_left_half_written_is_replaced(tmp_path):
    partial = tmp_path / "set.partial"
    partial.mkdir()
    (partial / "tokens").write_bytes(b"half")
    write_tokens(tmp_path / "set", [(Encoded([1, 2], [True, True]), "text")], sequence_length=4)
    assert ids_of(TokenSet.open(tmp_path / "set")) == [[1, 2]]
    assert not partial.exists()


def test_long_samples_are_cut_and_counted_and_those_left_without_target_dropped(tmp_path, spec):
    path = tmp_path / "data.jsonl"
    rows = [
        {"input_ids": [1] * 70},
        {"input_ids": [2] * 70, "labels": [-100] * 65 + [2] * 5},
        {"input_ids": [3] * 10, "labels": [-100] * 10},
        {"input_ids": [4]},
        {"input_ids": []},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    info = load_tokens(spec, make_tokenizer(), tmp_path / "cache").info
    assert (info.samples, info.tokens, info.trained_tokens) == (1, 64, 63)
    assert (info.cut_samples, info.cut_tokens, info.dropped_samples) == (2, 12, 4)
    assert info.kinds == {"input_ids": 5}


# Renders a conversation that ends oddly unlike its beginning, and without headers.
ODD = (
    "{% if 'odd' in messages[-1].content %}{% for m in messages %}{{ m.content }};{% endfor %}{% else %}"
    + PLAIN
    + "{% endif %}"
)


def conversations(path, *, odd, total):
    answers = ["odd" if index < odd else f"four {index}" for index in range(total)]
    rows = [{"messages": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": each}]} for each in answers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_few_conversations_whose_turns_cannot_be_found_are_left_out_counted_and_shown(tmp_path, spec):
    conversations(tmp_path / "data.jsonl", odd=2, total=20)
    for _ in ("made", "found in the cache"):
        made = load_tokens(spec, make_tokenizer(ODD), tmp_path / "cache")
        assert (made.info.samples, made.info.unmarked_samples, made.info.dropped_samples) == (18, 2, 0)
        assert made.info.kinds == {"messages": 20}
        assert made.notices == (
            "2 of 20 samples (10.0%) are skipped: the chat template refuses them, or their assistant tokens cannot be told "
            f"from the rest. The first is {tmp_path}/data.jsonl, line 1: the chat template renders the messages before "
            "message 1 otherwise than in the whole conversation",
        )


def test_what_is_no_error_is_said_with_its_first_place_and_number(tmp_path, spec):
    row = '{"instruction": "two?", "output": "four", "output": "five"}\n'
    (tmp_path / "data.jsonl").write_text(row * 3 + row.replace(', "output": "five"', ""))
    made = load_tokens(spec, make_tokenizer(PLAIN), tmp_path / "cache")
    assert made.notices == (
        f"{tmp_path}/data.jsonl, line 1 and 2 more: 'output' stands there twice; the last one is used",
        f"{tmp_path}/data.jsonl, line 1 and 3 more: instruction + output (Alpaca) is read as messages",
    )


def test_what_the_template_refuses_is_left_out_and_what_is_odd_is_said_with_its_place(tmp_path, spec):
    strict = "{% if messages[0].content == 'no' %}{{ raise_exception('never no') }}{% endif %}" + PLAIN
    conversations(tmp_path / "data.jsonl", odd=0, total=20)
    lines = (tmp_path / "data.jsonl").read_text().splitlines(keepends=True)
    lines[3], lines[7] = (
        lines[3].replace("two?", "no"),
        lines[7].replace('"role": "assistant"', '"role": "assistant", "mood": 1'),
    )
    (tmp_path / "data.jsonl").write_text("".join(lines))
    made = load_tokens(spec, make_tokenizer(strict), tmp_path / "cache")
    assert (made.info.samples, made.info.unmarked_samples) == (19, 1)
    left_out, odd = made.notices
    assert f"{tmp_path}/data.jsonl, line 4: the chat template refuses this conversation (never no); its roles are" in left_out
    assert odd == f"{tmp_path}/data.jsonl, line 8: messages have 'mood', which the chat template does not read"


def test_too_many_conversations_whose_turns_cannot_be_found_are_an_error_with_their_share(tmp_path, spec, monkeypatch):
    conversations(tmp_path / "data.jsonl", odd=3, total=20)
    expected = (
        r"^3 of 20 samples \(15.0%\) are skipped.*data.jsonl, line 1: .* More than 10% are too many. Put {% generation %}"
    )
    with pytest.raises(DataError, match=expected):
        load_tokens(spec, make_tokenizer(ODD), tmp_path / "cache")
    assert cached(tmp_path / "cache") == []
    monkeypatch.setattr(tokenize, "_TRIED_SAMPLES", 2)  # all of the first: the rest is not read
    with pytest.raises(DataError, match=r"^2 of 2 samples \(100.0%\)"):
        load_tokens(spec, make_tokenizer(ODD), tmp_path / "cache")


def test_a_data_set_with_nothing_to_train_is_refused_with_the_numbers(tmp_path, spec):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "%s", "completion": "x"}' % ("the " * 500))
    with pytest.raises(DataError, match=r"of 1 samples .prompt . completion.*1 of them after being cut to sequence_length 64"):
        load_tokens(spec, make_tokenizer(), tmp_path / "cache")


def test_files_of_different_kinds_make_one_set(tmp_path, spec):
    (tmp_path / "more.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    both = load_tokens(replace(spec, paths=(*spec.paths, str(tmp_path / "more.jsonl"))), make_tokenizer(), tmp_path / "cache")
    assert both.info.kinds == {"text": 20, "prompt + completion": 1}
    assert len(both) == 21


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"paths": ()}, "no file"),
        ({"sequence_length": 1}, "sequence_length: 1"),
        ({"tokens_per_step": 63}, "63 is less than one row of sequence_length 64"),
        ({"seed": -1}, "found -1"),
    ],
)
def test_options_that_cannot_be_are_refused(spec, change, found):
    with pytest.raises(ConfigError, match=found):
        replace(spec, **change)


def test_a_cache_directory_that_cannot_be_used_is_an_option_to_change(spec, tmp_path):
    (tmp_path / "file").write_text("precious")
    for cache in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/headrace-cache/tokens")):
        with pytest.raises(ConfigError, match=r"^cache: .*; choose another with cache=DIR"):
            load_tokens(spec, make_tokenizer(PLAIN), cache)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("what", ["lock", "tokens"])
def test_a_cache_that_cannot_be_written_is_an_option_to_change(spec, tmp_path, monkeypatch, what):
    cache = tmp_path / "cache"
    load_tokens(spec, make_tokenizer(PLAIN), cache)
    (made,) = cached(cache)
    shutil.rmtree(cache / made)
    if what == "lock":
        (cache / f"{made}.lock").unlink()
        (cache / f"{made}.lock").mkdir()
    else:
        (cache / f"{made}.partial").write_text("in the way")
    with pytest.raises(ConfigError, match=rf"^cache: {cache}.*{made}.*; choose another with cache=DIR"):
        load_tokens(spec, make_tokenizer(PLAIN), cache)


def test_a_set_that_is_there_needs_no_cache_that_can_be_written(spec, tmp_path, monkeypatch):
    """Such as one that is mounted read-only, or whose disk is full."""
    cache = tmp_path / "cache"
    expected = ids_of(load_tokens(spec, make_tokenizer(PLAIN), cache))
    for lock in cache.glob("*.lock"):
        lock.unlink()
    mkdtemp = tempfile.mkdtemp

    def elsewhere(suffix=None, prefix=None, dir=None):
        assert dir is None or not Path(dir).is_relative_to(cache)
        return mkdtemp(suffix, prefix, dir)

    def refuse(path, *arguments, **options):
        raise AssertionError(f"{path} opened to be written")

    monkeypatch.setattr(tempfile, "mkdtemp", elsewhere)
    monkeypatch.setattr(tokenize, "_locked", refuse)
    before = sorted(path.name for path in cache.iterdir())
    assert ids_of(load_tokens(spec, make_tokenizer(PLAIN), cache)) == expected
    assert sorted(path.name for path in cache.iterdir()) == before


def test_a_tokenizer_is_looked_at_in_the_cache_where_there_is_no_temporary_directory(spec, tmp_path, monkeypatch):
    """So that one directory only must be writable, and one message names it. What was killed there goes."""
    cache = tmp_path / "cache"
    (cache / "tokenizer.partial").mkdir(parents=True)
    (cache / "tokenizer.partial" / "tokenizer.json").write_text("half")
    expected = ids_of(load_tokens(spec, make_tokenizer(PLAIN), tmp_path / "other"))
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    assert ids_of(load_tokens(spec, make_tokenizer(PLAIN), cache)) == expected
    assert cached(cache) == cached(tmp_path / "other")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/model/spiece.model"),  # as `shutil.copyfile` names what it copied
        Exception("No space left on device (os error 28)"),  # as `tokenizers` has it
    ],
)
def test_no_space_to_look_at_a_tokenizer(spec, tmp_path, monkeypatch, error):
    tokenizer, folders = make_tokenizer(PLAIN), []
    really = tokenizer.save_pretrained

    def save_pretrained(folder):
        folders.append(Path(folder).parent)
        if len(folders) == 1 or not room:
            raise error
        really(folder)

    monkeypatch.setattr(tokenizer, "save_pretrained", save_pretrained)
    room = True
    assert len(load_tokens(spec, tokenizer, tmp_path / "cache")) == 20
    assert folders == [Path(tempfile.gettempdir()), tmp_path / "cache"]
    room = False
    with pytest.raises(DiskFull, match=rf"^cache: no space left in {tmp_path / 'cache'} \(now free: .*\); make room there"):
        load_tokens(spec, tokenizer, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("tokenizer") and path.is_dir()]


def test_what_is_wrong_with_a_tokenizer_is_not_put_down_to_a_disk(spec, tmp_path):
    class Broken:
        def save_pretrained(self, folder):
            raise ValueError("no vocabulary")

    with pytest.raises(ValueError, match="no vocabulary"):
        load_tokens(spec, Broken(), tmp_path / "cache")


def test_data_that_cannot_be_read_is_not_put_down_to_the_cache(spec, tmp_path, monkeypatch):
    def unreadable(source, *how, **more):
        raise OSError(errno.EIO, os.strerror(errno.EIO), spec.paths[0])

    monkeypatch.setattr(tokenize, "read", unreadable)
    with pytest.raises(OSError, match=r"data\.jsonl"):
        load_tokens(spec, make_tokenizer(PLAIN), tmp_path / "cache")
