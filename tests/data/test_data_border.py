"""Tokens that cross the border of prompt and completion: TRL's rules, recomputed from the tokenizer alone, and our own."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.data import DataSpec, TokenSet, load_tokens
from headrace.terms.options.border import Border, border_of, usual_border
from headrace.terms.options.preferences import Preferences

# A prompt that ends with a blank: with "four" it is one token, with "six" it is another, with "5" none.
PROMPT = "2+2= "
MERGES = [("f", "o"), ("u", "r"), ("fo", "ur"), ("Ġ", "four"), ("s", "i")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = ["<pad>", "<eos>", *"25+=fourisx", "Ġ", "fo", "ur", "four", "Ġfour", "si"]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def made(folder: Path, rows: list[dict[str, Any]], tokenizer: Any, **spec: Any) -> TokenSet:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    asked = DataSpec(paths=(str(path),), sequence_length=32, tokens_per_step=128, packing=False, **spec)
    return load_tokens(asked, tokenizer, folder / "cache")


def trained(tokens: TokenSet, tokenizer: Any) -> list[tuple[list[str], list[str]]]:
    """Return the tokens of each sample before what is trained, and what is trained."""
    samples = [tokens.sample(index) for index in range(len(tokens))]
    parts = [(each.input_ids[~each.trained], each.input_ids[each.trained]) for each in samples]
    return [tuple(tokenizer.convert_ids_to_tokens(part.tolist()) for part in each) for each in parts]  # type: ignore[misc]


def of_trl(tokenizer: Any, completion: str, start: int | None = None) -> tuple[list[str], list[str]]:
    """Return the tokens of both together, trained from where they part from those of the prompt alone, or from `start`."""
    alone, together = tokenizer(PROMPT).input_ids, tokenizer(PROMPT + completion + "<eos>").input_ids
    if start is None:
        start = next(place for place, each in enumerate([*alone, -1]) if together[place] != each)
    names = tokenizer.convert_ids_to_tokens(together)
    return names[:start], names[start:]


def test_joint_is_what_trl_trains(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": PROMPT, "completion": each} for each in ("four", "5")]
    tokens = made(tmp_path, rows, tokenizer, border=Border.JOINT)
    assert trained(tokens, tokenizer) == [of_trl(tokenizer, "four"), of_trl(tokenizer, "5")]
    assert trained(tokens, tokenizer)[0] == (list("2+2="), ["Ġfour", "<eos>"])
    assert tokens.notices == ()


def test_of_a_pair_both_begin_where_the_earlier_one_parts(tokenizer: Any, tmp_path: Path) -> None:
    pairs = {"preferences": Preferences.PAIRS, "border": Border.JOINT}
    tokens = made(tmp_path, [{"prompt": PROMPT, "chosen": "5", "rejected": "four"}], tokenizer, **pairs)
    start = len(of_trl(tokenizer, "four")[0])
    assert trained(tokens, tokenizer) == [of_trl(tokenizer, "5", start), of_trl(tokenizer, "four", start)]
    assert trained(tokens, tokenizer)[0][1] == ["Ġ", "5", "<eos>"]


def test_as_in_cpo_each_of_a_pair_begins_for_itself(tokenizer: Any, tmp_path: Path) -> None:
    pairs = {"preferences": Preferences.PAIRS, "border": Border.CPO}
    tokens = made(tmp_path, [{"prompt": PROMPT, "chosen": "5", "rejected": "four"}], tokenizer, **pairs)
    last = len(tokenizer(PROMPT).input_ids) - 1
    assert trained(tokens, tokenizer) == [of_trl(tokenizer, "5"), of_trl(tokenizer, "four", last)]


def test_apart_the_prompt_keeps_its_tokens_and_one_note_counts_the_rows(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": PROMPT, "completion": each} for each in ("four", "5", "four", "four")]
    tokens = made(tmp_path, rows, tokenizer)
    alone = tokenizer.convert_ids_to_tokens(tokenizer(PROMPT).input_ids)
    assert trained(tokens, tokenizer) == [(alone, [each, "<eos>"]) for each in ("four", "5", "four", "four")]
    (note,) = tokens.notices
    assert "line 1 and 2 more: a token crosses the border" in note
    assert "border: joint" in note


def test_labels_begin_where_their_own_tokens_part(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": PROMPT, "completion": each, "label": each == "four"} for each in ("four", "5")]
    tokens = made(tmp_path, rows, tokenizer, preferences=Preferences.LABELS, border=Border.JOINT)
    assert trained(tokens, tokenizer)[0::2] == [of_trl(tokenizer, "four"), of_trl(tokenizer, "5")]


def test_a_new_run_takes_the_rule_of_its_loss_and_a_begun_one_that_of_its_version() -> None:
    assert {loss: usual_border(loss) for loss in (None, "dpo", "kto:beta=1", "orpo")} == {
        None: "apart",
        "dpo": "joint",
        "kto:beta=1": "joint",
        "orpo": "joint",
    }
    found = [border_of("joint", loss) for loss in (None, "dpo:beta=1", "kto", "orpo:beta=1", "simpo")]
    assert found == [Border.JOINT, Border.JOINT, Border.JOINT, Border.CPO, Border.CPO]
    assert {border_of(chosen, loss) for chosen in (None, "apart") for loss in (None, "dpo", "orpo")} == {Border.APART}
