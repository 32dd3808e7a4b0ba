"""What lies beside an adapter counts: its chat template and tokenizer, and the model that is in its directory.

Run: pytest tests/generation/uses/test_beside.py
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from talking_model import TEMPLATE, save_talking_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.cli import main

PROMPT, WORDS = "water", ("--max-new-tokens", "6", "--temperature", "0", "--host-memory", "4GiB", "--compute-dtype", "float32")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and an adapter of it that peft wrote, whose numbers change answers."""
    folder = tmp_path_factory.mktemp("beside")
    model = save_talking_model(folder / "model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = get_peft_model(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            LoraConfig(r=2, target_modules=["q_proj", "down_proj"]),
        )
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.5)
        made.save_pretrained(folder / "adapter")
    return model, folder / "adapter"


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return int(left.value.code or 0)


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    code = run("generate", *words, "--prompt", PROMPT, *WORDS)
    out, err = capsys.readouterr()
    assert code == 0, err
    return out.removesuffix("\n")


def own(place: Path, template: str) -> str:
    """What transformers answers with what lies at `place`, when a prompt is put into `template`."""
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(place if (place / "tokenizer.json").exists() else place.parent / "model")
    asked = [{"role": "user", "content": PROMPT}]
    ids = tokenizer.apply_chat_template(
        asked, chat_template=template, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def test_the_template_of_an_adapter_goes_before_its_models(
    places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, adapter = places
    shutil.copytree(adapter, tmp_path / "adapter")
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "adapter" / "chat_template.jinja").write_text("OWN " + TEMPLATE)
    expected = own(tmp_path / "adapter", "OWN " + TEMPLATE)
    assert answer(capsys, tmp_path / "adapter") == answer(capsys, model, "--adapter", tmp_path / "adapter") == expected
    assert answer(capsys, adapter) == own(adapter, TEMPLATE) != expected


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, adapter = places
    shutil.copytree(adapter, tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.add_tokens([f"<fits{number}>" for number in range(320 - len(tokenizer))])
    tokenizer.chat_template = "OWN " + TEMPLATE
    tokenizer.save_pretrained(tmp_path / "adapter")
    assert answer(capsys, tmp_path / "adapter") == own(tmp_path / "adapter", "OWN " + TEMPLATE)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "adapter")
    for words in ((tmp_path / "adapter",), (model, "--adapter", tmp_path / "adapter")):
        assert run("generate", *words, "--prompt", "w", *WORDS) == 2
        assert "token 320 ('<new>')" in capsys.readouterr().err.splitlines()[-1]


def test_a_model_and_an_adapter_in_one_directory_answer_as_in_transformers(
    places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, adapter = places
    both = tmp_path / "both"
    shutil.copytree(model, both)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(adapter / name, both / name)
    expected = own(both, TEMPLATE)
    assert answer(capsys, both) == expected == own(adapter, TEMPLATE)
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "water"}) + "\n")
    (tmp_path / "run.yaml").write_text(f"model: {both}\ndata: {tmp_path / 'd.jsonl'}\noutput: {tmp_path / 'run'}\n")
    for words in (
        ("train", both, tmp_path / "d.jsonl", "--output", tmp_path / "run"),
        ("train", tmp_path / "run.yaml"),
        ("compress", both, tmp_path / "out", "--to", "int4"),
    ):
        assert run(*words) == 2
        assert "holds a model and an adapter" in capsys.readouterr().err.splitlines()[-1]
    (both / "adapter_model.safetensors").unlink()
    assert answer(capsys, both) == own(model, TEMPLATE) != expected
