"""A small world for commands that are refused: model, data, SSD directory, and what makes each of them bad.

The model is a real one, saved by transformers in several shards, so that every file that a user may have is there.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from headrace.cli import main

POSITIONS, VOCABULARY = 64, 320


def save_model(directory: Path, **changes: Any) -> Path:
    """Save a tiny Llama with a byte-level tokenizer."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        **changes,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="30KB")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=260, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["water"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(str(directory))
    return directory


class World:
    """The files of a case, and the command that would train on them if nothing were bad."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str] | None = None) -> None:
        self.folder, self.capsys = folder, capsys
        self.model, self.data, self.ssd, self.run = (folder / name for name in ("model", "data.jsonl", "ssd", "run"))

    def fill(self, template: Path) -> Self:
        """Make the files."""
        shutil.copytree(template, self.model)
        self.data.write_text("".join(json.dumps({"text": f"water {i} flows to the turbine"}) + "\n" for i in range(20)))
        self.ssd.mkdir()
        return self

    def train_words(self, *more: object, **changes: object) -> list[str]:
        """The words of `headrace train`; `changes` replace or add options."""
        options: dict[str, object] = {
            "output": self.run,
            "ssd": self.ssd,
            "host-memory": "4GiB",
            "sequence-length": 32,
            "tokens-per-step": 64,
            "max-steps": 2,
        }
        options |= {name.replace("_", "-"): value for name, value in changes.items()}
        words: list[object] = ["train", self.model, self.data, "--no-measure"]
        for name, value in options.items():
            for each in value if isinstance(value, list) else [value]:
                words += [f"--{name}", each]
        return [str(word) for word in [*words, *more]]

    def refused(self, *words: object) -> str:
        """Run the command; return its one line on stderr, after checking that it is one and that no file has changed."""
        assert self.capsys is not None
        before = listing(self.folder)
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        captured = self.capsys.readouterr()
        check_refusal(int(left.value.code or 0), captured.err)
        assert listing(self.folder) == before
        return captured.err

    def train_refused(self, *more: object, **changes: object) -> str:
        """`headrace train`, refused."""
        return self.refused(*self.train_words(*more, **changes))

    def edit_config(self, **changes: object) -> None:
        """Change keys of the model's config.json."""
        path = self.model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def write_rows(self, *rows: object) -> None:
        """Replace the data by `rows`."""
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def shards(self) -> list[Path]:
        """The model's weight files."""
        found = sorted(self.model.glob("*.safetensors"))
        assert len(found) > 2
        return found


def check_refusal(code: int, said: str) -> None:
    """Exit code 2 and one line that a person can read to its end."""
    assert code == 2, said
    assert said.startswith("error: ")
    assert said.endswith("\n")
    assert said.count("\n") == 1, said
    assert "Traceback" not in said
    assert len(said) < 700, said


def listing(folder: Path) -> dict[str, str]:
    """Everything below `folder`: relative path -> kind, or digest of the content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = f"link to {path.readlink()}"
        elif path.is_dir():
            found[str(path.relative_to(folder))] = "directory"
        else:
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
