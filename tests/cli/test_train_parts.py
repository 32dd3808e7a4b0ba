"""`headrace train` on a model of pictures and text, from its directory to one that opens as what it was.

Run: pytest tests/cli/test_train_parts.py
"""

import pytest
import torch
from bad_worlds import VOCABULARY, World
from tiny_wholes import make_whole
from transformers import AutoModelForImageTextToText

from headrace.cli import main


@pytest.mark.wide
def test_the_text_model_is_trained_and_the_other_parts_stay(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    for path in world.model.glob("model*"):
        path.unlink()
    make_whole("gemma3", vocab_size=VOCABULARY).save_pretrained(world.model)
    with pytest.raises(SystemExit) as left:
        main(world.train_words())
    said = capsys.readouterr()
    assert not left.value.code, said.err
    assert "of Gemma3ForConditionalGeneration the text model is trained; its other parts stay" in said.out
    before, after = (
        AutoModelForImageTextToText.from_pretrained(directory).state_dict() for directory in (world.model, world.run / "final")
    )
    changed = {key for key, value in before.items() if not torch.equal(value, after[key])}
    assert changed == {key for key in before if key.startswith(("model.language_model.", "lm_head."))}


@pytest.mark.wide
def test_plan_calls_the_model_as_train_does_and_says_what_is_trained(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    make_whole("gemma3", vocab_size=VOCABULARY).save_pretrained(world.model)
    with pytest.raises(SystemExit) as left:
        main(["plan", str(world.model), "--tokens-per-step", "64", "--sequence-length", "32"])
    said = capsys.readouterr()
    assert not left.value.code, said.err
    assert "model     Gemma3ForConditionalGeneration, 0.0" in said.out
    assert "of Gemma3ForConditionalGeneration the text model is trained" in said.out
