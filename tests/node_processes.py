"""The processes of a run of several machines, to be killed: a node, and workers. All over loopback."""

import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from headrace.peers.meet.address import Address
from headrace.peers.node.run import serve
from headrace.peers.node.working import work
from headrace.runs.protocols import NoDisplay
from headrace.terms.errors import HeadraceError
from headrace.terms.options.options import Options
from headrace.terms.options.run_options import NodeOptions

STEPS, SILENCE_SECONDS = 10, 3.0


def rank_process(torchrun: int, number: int) -> int:
    """Return the process of a rank that the process `torchrun` has started."""
    for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        if f"\0RANK={number}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"torchrun has no rank {number}")


def write_model(folder: Path, dtype: torch.dtype = torch.bfloat16, **more: Any) -> None:
    """Write a tiny model with a tokenizer, and data; `more` is of the model's configuration."""
    torch.manual_seed(3)
    shape = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(**shape | more, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder / "model")
    write_texts(folder)


def write_texts(folder: Path, samples: int = 64) -> None:
    """Write data, and a tokenizer of 300 tokens into the model's directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["water flows to the turbine"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(folder / "model")
    texts = [{"text": f"the {number} th drop of water falls " * 4} for number in range(samples)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, texts)) + "\n")


def node(folder: str, output: str, port: int, workers: int | str, more: dict[str, Any]) -> None:
    """Be the node; the file `output`.port has the port when it listens."""
    torch.set_num_threads(1)
    place = Path(folder)
    config = NodeOptions.of(
        {
            "model": place / "model",
            "data": [str(place / "data.jsonl")],
            "output": output,
            "cache": place / "cache",
            "listen": f"127.0.0.1:{port}",
            "workers": workers,
            "max_steps": STEPS,
            "sequence_length": 32,
            "tokens_per_step": 128,
            "host_memory": "2GiB",
            "learning_rate": 1e-3,
        }
        | more
    )
    there = Path(f"{output}.port")
    serve(config, display=Words(), silence_seconds=SILENCE_SECONDS, listening=lambda address: _write(there, str(address.port)))


def another_node(folder: str, output: str, said: str, more: dict[str, Any]) -> None:
    """Be a second node on one directory; the file `said` has why it is refused."""
    try:
        node(folder, output, 0, 1, more)
    except HeadraceError as error:
        _write(Path(said), str(error))


def worker(
    port: int,
    name: str,
    host: str = "127.0.0.1",
    secret: str | None = None,
    said: str | None = None,
    host_memory: str = "2GiB",
    scratch: str | None = None,
    ssd: str | None = None,
) -> None:
    """Be a worker, and print what it has to say, or add it to the file `said`; its files lie in `scratch`, a
    learner's in `ssd`."""
    torch.set_num_threads(1)
    tempfile.tempdir = scratch
    word = Path(secret).read_bytes() if secret else None
    options, display = Options(host_memory=host_memory, ssd=(ssd,) if ssd else ()), Words(said)
    work(Address(host, port), options, name=name, wait_seconds=60.0, secret=word, display=display)
    display.say(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss} KiB")


class Words(NoDisplay):
    """Prints the lines that a user would see."""

    def __init__(self, said: str | None = None) -> None:
        self._said = said

    def say(self, text: str) -> None:
        """Print a line."""
        with open(self._said or os.devnull, "a") as file:
            print(text, file=file if self._said else None, flush=True)


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
