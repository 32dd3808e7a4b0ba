"""Tiny stock models in directories, and what transformers itself generates with them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_models import DTYPES
from tiny_architectures import CONFIGS, make_config, make_plain
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

Prompts = Sequence[Sequence[int]]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that saves (once) the stock model of an architecture."""
    made: dict[tuple[str, str], Path] = {}

    def save(name: str, dtype: str = "float32") -> Path:
        if (name, dtype) not in made:
            path = tmp_path_factory.mktemp(f"{name}-{dtype}")
            make_plain(make_config(CONFIGS[name]), DTYPES[dtype]).save_pretrained(path, max_shard_size="20KB")
            made[name, dtype] = path
        return made[name, dtype]

    return save


@pytest.fixture(scope="session")
def stock() -> Iterator[Callable[..., torch.Tensor]]:
    """Return a function that generates with `from_pretrained` and `generate`, experts one by one as seats have them."""
    models: dict[tuple[Path, str], Any] = {}

    def generate(
        directory: Path, dtype: str, rows: Prompts, seed: int, settings: Mapping[str, Any], *, fresh: bool = False
    ) -> Any:
        key = (directory, dtype)
        if fresh:  # some keep in their modules what ran before
            models.pop(key, None)
        if key not in models:
            models[key] = AutoModelForCausalLM.from_pretrained(
                directory, dtype=DTYPES[dtype], experts_implementation="eager"
            ).eval()
            for parameter in models[key].parameters():  # loaded, they lie as in the file: at borders that change float32 sums
                parameter.data = parameter.data.clone()
        length = max(map(len, rows))
        ids = torch.tensor([[0] * (length - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return models[key].generate(ids, attention_mask=mask, use_cache=True, **settings)

    yield generate
    models.clear()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte-level tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("talks") / "model"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=320, max_position_embeddings=64, eos_token_id=0, bos_token_id=None, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(directory, max_shard_size="30KB")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=260, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["water"], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    whole.chat_template = TEMPLATE
    whole.save_pretrained(str(directory))
    return directory
