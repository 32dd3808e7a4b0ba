"""Labelled completions: which columns are read, that each has another's completion beside it, and that labels stay with it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_tokenizers import make_tokenizer

from headrace.data import BatchStream, DataSpec, TokenSet, load_tokens
from headrace.data.batches.held_out import split_off
from headrace.terms.errors import ConfigError, DataError
from headrace.terms.options.preferences import Preferences


def _spec(path: Path, **values: Any) -> DataSpec:
    given = {"sequence_length": 32, "tokens_per_step": 8 * 32, "packing": False, "preferences": Preferences.LABELS}
    return DataSpec(paths=(str(path),), **given | values)


def _tokens(folder: Path, rows: list[dict[str, Any]], **values: Any) -> tuple[TokenSet, DataSpec]:
    path = folder / "labelled.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    spec = _spec(path, **values)
    return load_tokens(spec, make_tokenizer(), folder / "cache"), spec


def _texts(tokens: TokenSet) -> list[tuple[str, str]]:
    """Return prompt and completion of each sample."""
    tokenizer, found = make_tokenizer(), []
    for sample in map(tokens.sample, range(len(tokens))):
        parts = (sample.input_ids[~sample.trained], sample.input_ids[sample.trained])
        found.append(tuple(str(tokenizer.decode(part.tolist(), skip_special_tokens=True)) for part in parts))
    return found


ROWS = [{"prompt": f"ask {n}:", "completion": f" say {n}", "label": n % 2 == 0} for n in range(6)]


def test_each_prompt_is_there_with_its_completion_and_with_the_one_before_it_in_its_step(tmp_path: Path) -> None:
    tokens, _ = _tokens(tmp_path, ROWS)
    others = [3, 0, 1, 2, 5, 4]  # within a step of four
    expected = [pair for n in range(6) for pair in ((f"ask {n}:", f" say {n}"), (f"ask {n}:", f" say {others[n]}"))]
    assert _texts(tokens) == expected


def test_labels_stay_with_their_samples_when_these_are_shuffled_and_held_out(tmp_path: Path) -> None:
    tokens, spec = _tokens(tmp_path, ROWS)
    trained = split_off(tokens, 0.3, seed=1, together=2)
    for part in (trained, trained.held_out):
        assert part is not None
        batch = BatchStream(part, spec).next_batch()
        assert batch.samples is not None
        assert batch.desirable is not None
        texts = [_texts(part)[sample][0] for sample in batch.samples]
        assert batch.desirable.tolist() == [int(text[4]) % 2 == 0 for text in texts]
        assert (batch.samples[1::2] == batch.samples[0::2] + 1).all()


def test_without_shuffling_the_steps_are_those_of_trl(tmp_path: Path) -> None:
    """TRL takes rows in their order, and turns the completions of a batch by one."""
    stream = BatchStream(*_tokens(tmp_path, ROWS, shuffle=False))
    batch = stream.next_batch()
    assert batch.samples is not None
    assert batch.samples.tolist() == list(range(8))
    masks = batch.labels != -100
    completions = [row[mask].tolist() for row, mask in zip(batch.input_ids, masks, strict=True)]
    assert completions[1::2] == completions[-2:-1] + completions[:-2:2]


def test_of_pairs_what_was_chosen_is_desirable(tmp_path: Path) -> None:
    rows = [{"prompt": f"ask {n}:", "chosen": f" good {n}", "rejected": f" bad {n}"} for n in range(2)]
    tokens, _ = _tokens(tmp_path, rows)
    assert _texts(tokens)[0::2] == [("ask 0:", " good 0"), ("ask 1:", " good 1"), ("ask 0:", " bad 0"), ("ask 1:", " bad 1")]
    desirable = tokens.desirable(list(range(8)))
    assert desirable is not None
    assert desirable.tolist() == [True] * 4 + [False] * 4


def test_what_has_no_prompt_or_nothing_left_is_left_out_before_completions_move_on(tmp_path: Path) -> None:
    rows = [*ROWS[:2], {**ROWS[2], "prompt": "y" * 40}, *ROWS[3:5]]
    tokens, _ = _tokens(tmp_path, rows)
    assert [text for _, text in _texts(tokens)[1::2]] == [" say 4", " say 0", " say 1", " say 3"]
    assert tokens.info.dropped_samples == 2


def test_a_damaged_label_is_told(tmp_path: Path) -> None:
    _tokens(tmp_path, ROWS)
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    (folder / "labels").write_bytes(bytes(np.ones(12, dtype=np.uint8)))
    with pytest.raises(DataError, match="labels"):
        TokenSet.open(folder)


@pytest.mark.parametrize("label", ["yes", 2, 0.5, [True]])
def test_what_is_no_label_is_refused_with_its_place(label: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: label must be true or false"):
        _tokens(tmp_path, [{**ROWS[0], "label": label}])


def test_data_without_labels_are_told_of_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="completion \\+ label"):
        _tokens(tmp_path, [{"prompt": "a", "completion": "b"}])


def test_a_step_of_one_completion_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kto compares several; give at least 128"):
        _spec(tmp_path, tokens_per_step=64)
