"""Tiny models with a tokenizer, data for them, and a compression that can be killed, for the tests of this folder."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from headrace.codec.table import CODES
from headrace.codec.targets import TernaryTarget
from headrace.compress.recoding import recode
from headrace.compress.run import Compressed, compress_model
from headrace.terms.options.compress_options import CompressOptions

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
EXPERTS = SIZES | {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}


def write_model(directory: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    """Save a model of random weights whose activations are of ordinary size, and a tokenizer of bytes."""
    torch.manual_seed(5)
    made = CONFIG_MAPPING[kind](**{**(EXPERTS if kind == "mixtral" else SIZES), **config})
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.to(dtype).save_pretrained(directory)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["water flows to the turbine"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(str(directory))
    return directory


def write_data(path: Path, samples: int = 80) -> Path:
    """Write samples of text of several lengths."""
    lines = [json.dumps({"text": f"{i * i} is what {i} times {i} makes; " * (1 + i % 3)}) for i in range(samples)]
    path.write_text("\n".join(lines) + "\n")
    return path


def options(model: Path, folder: Path, **more: Any) -> CompressOptions:
    """Return options for a quick compression of `model` into `folder / "out"`, in float32."""
    values = {
        "model": model,
        "output": folder / "out",
        "data": str(write_data(folder / "data.jsonl")),
        "to": "int4",
        "group_size": 32,
        "sequence_length": 48,
        "compute_dtype": "float32",
        "host_memory": "1GiB",
        "cache": folder / "cache",
    }
    return CompressOptions.of(values | more)


def run(model: Path, folder: Path, **more: Any) -> Compressed:
    """Compress `model` into `folder / "out"`."""
    folder.mkdir(exist_ok=True)
    return compress_model(options(model, folder, **more))


def write_words(patch: pytest.MonkeyPatch) -> None:
    """Let ternary weights be words wherever these are shorter than trits."""
    row = replace(CODES["ternary"], target=lambda group: TernaryTarget(least_gain_bytes=1))
    patch.setitem(CODES, "ternary", row)


def run_to_words(model: Path, folder: Path, stop: Callable[[], Any] = lambda: None) -> None:
    """Compress experts to ternary weights, in words wherever these are shorter than trits: tables are in the files, too."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        write_words(patch)
        stop()
        run(model, folder, to="ternary", experts_only=True)


def run_and_be_killed(model: Path, folder: Path, calls: int, to: str = "int4") -> None:
    """Compress, in a process of its own, that is killed at the call of that number that moves or syncs anything."""
    torch.set_num_threads(1)
    left = [calls]

    def counted(call: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return run

    def begin() -> None:
        for name in ("write", "pwrite", "fsync", "replace", "rename"):
            setattr(os, name, counted(getattr(os, name)))

    if to == "ternary":
        run_to_words(model, folder, begin)
    if CODES[to].direct:
        begin()
        recode(CompressOptions.of({"model": model, "output": folder / "out", "to": to}))
    begin()
    compress_model(options(model, folder))


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a compressed model by name."""
    return {path.name: path.read_bytes() for path in sorted((folder / "out").iterdir())}
