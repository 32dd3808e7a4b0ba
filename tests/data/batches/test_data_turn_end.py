"""What was tuned on conversations ends its answers where their turns end."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiers import sampled
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.cli.exporting import export_run
from headrace.data.batches.turn_end import turn_end, turn_end_file
from headrace.engine.trainer import Engine
from headrace.generate.passes.opened import GenerationModel
from headrace.generate.passes.whose_weights import open_whose_model
from headrace.runs import train
from headrace.terms.options.budget import Budget
from headrace.terms.options.run_options import RunOptions

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}END{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDS = {
    "<|im_end|>\\n": 4,
    "<|im_end|>": 4,
    "</s>": 2,
    " <|end|>\\n\\n": 5,
    "<|im_end|>\\n</s>": 4,
    "\\n### done": None,
    "": None,
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho ho"}]}
DATA: dict[str, Any] = {
    "messages": CHAT,
    "completion": {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]},
    "alpaca": {"instruction": "Hi", "output": "Ho"},
    "pairs": {
        "prompt": CHAT["messages"][:1],
        "chosen": CHAT["messages"][1:],
        "rejected": [{"role": "assistant", "content": "No"}],
    },
    "text": {"text": "Hi"},
}


def make_model(directory: Path, end: str) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["water"], trainer)
    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": SPECIAL[3:]}
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)
    whole.chat_template = TEMPLATE.replace("END", end)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=320, max_position_embeddings=64, **sizes)).save_pretrained(directory)
    whole.save_pretrained(str(directory))
    return directory


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_turn_is_found_by_rendering(end: str, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(make_model(tmp_path, end.replace("\\n", "\n")))
    assert turn_end(tokenizer)[1] == ENDS[end]


@pytest.mark.parametrize("form", DATA)
@pytest.mark.parametrize("own", [None, 2, [2, 7], [4]])
def test_it_is_added_where_conversations_were_trained(form: str, own: Any, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "<|im_end|>\n")
    (tmp_path / "data.jsonl").write_text(json.dumps(DATA[form]) + "\n")
    out = tmp_path / "out"
    out.mkdir()
    before = {"eos_token_id": own, "top_p": 0.9}
    (out / "generation_config.json").write_text(json.dumps(before))
    loss = "dpo" if form == "pairs" else None
    files, note = turn_end_file(RunOptions(model=model, data=(str(tmp_path / "data.jsonl"),), loss=loss), out)
    after = json.loads(files.get("generation_config.json", json.dumps(before)))
    if form == "text" or own == [4]:
        assert (note, after) == ("", before)
    else:
        assert "<|im_end|>" in note
        expected = {None: 4, 2: [2, 4]}.get(own) if not isinstance(own, list) else [2, 7, 4]
        assert after == {"eos_token_id": expected, "top_p": 0.9}


@pytest.mark.parametrize("way", sampled(["whole", "adapters", "merged", "finished", "finished, merged"]))
def test_an_export_has_it_when_it_appears(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed just after the rename leaves an export that may be sent."""
    model = make_model(tmp_path / "model", "<|im_end|>\n")
    (tmp_path / "data.jsonl").write_text((json.dumps(CHAT) + "\n") * 8)
    values = {"model": model, "data": (str(tmp_path / "data.jsonl"),), "output": tmp_path / "run", "cache": tmp_path / "cache"}
    values |= {"max_steps": 1, "sequence_length": 32, "host_memory": "4GiB", "keep_state": True}
    final = train(RunOptions.of(values | {"adapter": "lora" if way not in ("whole", "finished") else None})).final
    if "finished" not in way:
        shutil.rmtree(final)
    else:
        Engine.resume(tmp_path / "run").remove_state()
    seen, replace, out = list[Any](), os.replace, tmp_path / "out"

    def replaced(source: Any, target: Any) -> None:
        if Path(target) == out:
            seen.append(json.loads((Path(source) / "generation_config.json").read_text())["eos_token_id"])
        replace(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    export_run(tmp_path / "run", out, merge="merged" in way)
    assert seen == [[2, 4]]
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 4]


@pytest.mark.parametrize("adapter", sampled([None, "lora"]))
def test_a_run_leaves_it_and_generating_reads_it(adapter: str | None, tmp_path: Path) -> None:
    """So does generating from a run that is not finished: its answers end as those of its export will."""
    model = make_model(tmp_path / "model", "<|im_end|>\n")
    (tmp_path / "data.jsonl").write_text((json.dumps(CHAT) + "\n") * 8)
    values = {"model": model, "data": (str(tmp_path / "data.jsonl"),), "output": tmp_path / "run", "cache": tmp_path / "cache"}
    values |= {"max_steps": 1, "sequence_length": 32, "adapter": adapter, "host_memory": "4GiB", "keep_state": True}
    finished = train(RunOptions.of(values))
    assert 4 in json.loads((finished.final / "generation_config.json").read_text())["eos_token_id"]
    places: list[tuple[Path, Path | None]] = [(tmp_path / "run", None)]
    for place, beside in [*places, (model, finished.final)] if adapter else places:
        found: GenerationModel = open_whose_model(place, Budget(host="4GiB"), None, None, adapter=beside)
        assert 4 in found.generation_config.eos_token_id
        found.close()
    shutil.rmtree(finished.final)
    unfinished: GenerationModel = open_whose_model(tmp_path / "run", Budget(host="4GiB"), None, None)
    assert 4 in unfinished.generation_config.eos_token_id
    assert any("token 4 is added" in note for note in unfinished.notes)
    unfinished.close()
