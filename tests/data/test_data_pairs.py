"""Preferences: which columns are read, what of them is trained, and that both sides of a choice stay together."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_tokenizers import make_tokenizer

from headrace.data import BatchStream, DataSpec, load_tokens
from headrace.data.batches.held_out import HeldOutRows, split_off
from headrace.data.pairs.preferences import read_pairs
from headrace.data.read.sources import find_sources, read_rows
from headrace.terms.errors import ConfigError, DataError
from headrace.terms.options.data_source import DataSource
from headrace.terms.options.preferences import Preferences


def _spec(path: Path, length: int = 32, rows: int = 4) -> DataSpec:
    return DataSpec(
        paths=(str(path),), sequence_length=length, tokens_per_step=rows * length, packing=False, preferences=Preferences.PAIRS
    )


def _tokens(folder: Path, rows: list[dict[str, Any]], **spec: int) -> Any:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_tokens(_spec(path, **spec), make_tokenizer(), folder / "cache"), _spec(path, **spec)


def _trained_text(tokens: Any, index: int) -> str:
    sample = tokens.sample(index)
    return str(make_tokenizer().decode(sample.input_ids[sample.trained].tolist(), skip_special_tokens=True))


ROWS = [{"prompt": f"question {n}:", "chosen": f" good {n}", "rejected": f" bad {n}"} for n in range(10)]


def test_each_row_is_two_samples_whose_completions_are_trained(tmp_path: Path) -> None:
    tokens, _ = _tokens(tmp_path, ROWS)
    assert len(tokens) == 20
    assert [_trained_text(tokens, index) for index in (0, 1, 18, 19)] == [" good 0", " bad 0", " good 9", " bad 9"]


def test_without_a_prompt_it_is_what_both_begin_with(tmp_path: Path) -> None:
    tokens, _ = _tokens(tmp_path, [{"chosen": "ask: yes it is", "rejected": "ask: no"}])
    assert [_trained_text(tokens, index) for index in (0, 1)] == [" yes it is", " no"]


def test_a_pair_of_which_one_side_has_nothing_left_is_left_out(tmp_path: Path) -> None:
    long = {"prompt": "x" * 20, "chosen": "ok", "rejected": "no"}
    tokens, _ = _tokens(tmp_path, [{**long, "prompt": "y" * 40}, long], length=32)
    assert len(tokens) == 2
    assert tokens.info.dropped_samples == 2


def test_both_sides_of_a_choice_are_in_one_step_in_each_epoch(tmp_path: Path) -> None:
    stream = BatchStream(*_tokens(tmp_path, ROWS))
    seen = [stream.next_batch().samples for _ in range(10)]
    assert all(samples is not None and (samples[1::2] == samples[0::2] + 1).all() for samples in seen)
    first = np.concatenate([samples for samples in seen[:5] if samples is not None])
    assert sorted(first.tolist()) == list(range(20))


def test_held_out_samples_are_whole_pairs(tmp_path: Path) -> None:
    tokens, spec = _tokens(tmp_path, ROWS)
    trained = split_off(tokens, 0.3, seed=1, together=2)
    assert (len(trained), len(trained.held_out)) == (14, 6)
    for batch in HeldOutRows(trained.held_out, spec).batches():
        assert batch.samples is not None
        assert (batch.samples[1::2] == batch.samples[0::2] + 1).all()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "alone"}, "chosen \\+ rejected"),
        ({"chosen": "a", "rejected": "a"}, "equal"),
        ({"chosen": "a", "rejected": [{"role": "assistant", "content": "b"}]}, "both be texts"),
        ({"prompt": "q", "chosen": "a"}, "chosen \\+ rejected"),
    ],
)
def test_what_is_no_choice_is_refused_with_its_place(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words) as found:
        _tokens(tmp_path, [row])
    assert "line 1" in str(found.value)


def test_a_step_of_half_a_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="even number"):
        _spec(tmp_path, rows=3)


def test_weights_of_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weight and loss"):
        DataSpec(
            paths=(DataSource(path="a.jsonl", weight=2),),
            sequence_length=8,
            tokens_per_step=16,
            preferences=Preferences.PAIRS,
            packing=False,
        )


def test_preferences_without_a_loss_are_told_of_it(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"chosen": "a", "rejected": "b"}\n')
    (source,) = find_sources([str(tmp_path / "pairs.jsonl")], tmp_path)
    with pytest.raises(DataError, match="--loss"):
        read_rows(source)


def _said(*texts: str) -> list[dict[str, str]]:
    """Return messages of user and assistant in turns."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


SYSTEM = [{"role": "system", "content": "Be brief."}]


@pytest.mark.parametrize(
    ("prompt", "shared"),
    [
        ("river?", SYSTEM + _said("river?")),
        ("river?", _said("river?", "Rhine", "more?")),
        ("more?", _said("river?", "Rhine", "more?")),
    ],
)
def test_a_text_beside_conversations_is_no_prompt(prompt: str, shared: list[Any], tmp_path: Path) -> None:
    answers = {"chosen": _said("", "Elbe")[1:], "rejected": _said("", "none")[1:]}
    whole = {"prompt": prompt, **{name: shared + answer for name, answer in answers.items()}}
    (tmp_path / "p.jsonl").write_text(json.dumps(whole) + "\n" + json.dumps({"prompt": shared, **answers}) + "\n")
    (source,) = find_sources([str(tmp_path / "p.jsonl")], tmp_path)
    rows = list(read_pairs(source)[1])
    assert [row.values for row in rows[:2]] == [row.values for row in rows[2:]]
    assert ["not used" in " ".join(row.remarks) for row in rows] == [True, False, False, False]


def test_one_conversation_that_goes_on_from_the_other_keeps_an_answer(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"chosen": _said("a", "b"), "rejected": _said("a", "b", "c", "d")}) + "\n")
    (source,) = find_sources([str(tmp_path / "p.jsonl")], tmp_path)
    assert [row.values["completion"] for row in read_pairs(source)[1]] == [_said("a", "b")[1:], _said("a", "b", "c", "d")[1:]]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": _said("a"), "chosen": _said("a", "b"), "rejected": _said("", "c")[1:]}, "only one of chosen and rejected"),
        ({"prompt": "q", "chosen": _said("a", "b"), "rejected": _said("c", "d")}, "no first message in common"),
    ],
)
def test_conversations_without_a_certain_prompt_are_refused(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    (source,) = find_sources([str(tmp_path / "p.jsonl")], tmp_path)
    with pytest.raises(DataError, match=words):
        list(read_pairs(source)[1])


def test_beside_answers_alone_a_text_is_what_the_user_says(tmp_path: Path) -> None:
    answers = {"chosen": _said("", "b")[1:], "rejected": _said("", "c")[1:]}
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "q", **answers}) + "\n")
    (source,) = find_sources([str(tmp_path / "p.jsonl")], tmp_path)
    assert [row.values["prompt"] for row in read_pairs(source)[1]] == [_said("q")] * 2
